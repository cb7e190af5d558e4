from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice, OutputFormat, OutputKind
from fabric.turn.generation import Identity, IdentityKind
from router.openai.responses.request import parse_responses
from tests.support.any_json import ANY_JSON
from tests.support.conversations import template_messages

SMALLEST = {"model": "m", "input": "hi"}


def parse(headers=None, **fields):
    return parse_responses(headers or {}, {**SMALLEST, **fields})


def messages(*items, **fields):
    return template_messages(parse(input=list(items), **fields).prompt)


def test_first_request_of_coding_agent_is_read():
    def message(role, text):
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    request = parse(
        input=[
            message("developer", "a"),
            message("developer", "b"),
            message("user", "c"),
            message("user", "d"),
        ],
        tools=[
            {"type": "function", "name": "shell", "parameters": {}, "strict": False},
            {"type": "namespace", "name": "mcp", "description": "", "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="session-1",
        text={"verbosity": "low"},
        client_metadata={"x": "y"},
    )

    assert request.identity == Identity(IdentityKind.GROUP, "session-1")
    assert [(m["role"], m["content"]) for m in template_messages(request.prompt)] == [
        ("system", "a\n\nb"),
        ("user", "c\n\nd"),
    ]
    assert [tool["function"]["name"] for tool in request.prompt.tools] == ["shell"]
    assert request.prompt.template_options == {"reasoning_effort": "medium"}
    assert request.ignored == ("web_search",)
    assert (request.stream, request.keeps) == (True, False)
    assert request.prompt.calls == CallChoice(takes_one=True)
    assert request.carries_thoughts


def test_billing_header_line_from_proxy_is_dropped_and_listed():
    billing = "x-anthropic-billing-header: cc_version=2.1"
    request = parse(input="c", instructions=f"{billing}\na")
    assert [m["content"] for m in template_messages(request.prompt)] == ["a", "c"]
    assert request.ignored == ("x-anthropic-billing-header",)
    assert parse(input=[], previous_response_id="resp_1", instructions="a").ignored == ()


def test_instructions_precede_developer_messages():
    found = messages(
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        instructions="a",
    )

    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "a\n\nb"),
        ("user", "c"),
        ("assistant", "d"),
    ]


def test_tool_choice_none_keeps_tools_in_prompt_but_parses_no_calls():
    tools = [{"type": "function", "name": "look", "parameters": {}}]
    none = parse(tools=tools, tool_choice="none").prompt
    auto = parse(tools=tools).prompt

    assert none.tools == auto.tools
    assert (none.reads_calls, auto.reads_calls) == (False, True)


def test_tools_of_every_kind_can_be_chosen_by_name():
    tools = [
        {"type": "function", "name": "look", "strict": True},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
    ]
    chosen = [
        ({"type": "function", "name": "look"}, ("look",)),
        ({"type": "custom", "name": "patch"}, ("patch",)),
        ({"type": "function", "name": "read", "namespace": "files"}, ("files__read",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [tools[0], tools[1]]},
            ("look", "patch"),
        ),
    ]
    for choice, names in chosen:
        calls = parse(tools=tools, tool_choice=choice).prompt.calls
        assert (calls.names, calls.strict) == (names, ("look",))
        assert calls.must_call == (choice["type"] != "allowed_tools")


def test_custom_tool_grammar_appears_in_its_description():
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "X"+'}
    prompt = parse(tools=[{"type": "custom", "name": "p", "format": form}]).prompt

    function = prompt.tools[0]["function"]
    assert function["description"] == 'The input follows this lark grammar:\nstart: "X"+'
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:(?:(?:X)+))$"
    assert prompt.calls == CallChoice(strict=("p",))


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "xhigh"])
def test_effort_maps_to_template_values(effort):
    options = parse(reasoning={"effort": effort}).prompt.template_options
    known = {"none": "low", "minimal": "low", "low": "low", "xhigh": "high"}

    assert options["reasoning_effort"] == known[effort]
    assert options.get("enable_thinking") is (False if effort == "none" else None)


def test_foreign_encrypted_reasoning_is_dropped_but_summary_is_used():
    for sealed in ("gAAAA", "%%%", "", "é"):
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        assert "reasoning_content" not in messages(item, {"role": "user", "content": "x"})[0]
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages(summed, {"role": "user", "content": "x"})[0]["reasoning_content"] == "s"


def test_text_format_sets_output_format():
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = [
        parse(text={"format": each}).sampling.output
        for each in (
            {"type": "text"},
            {"type": "json_object"},
            form,
            {**form, "strict": False},
            {**form, "strict": None},
        )
    ]

    strict = OutputFormat(OutputKind.JSON_SCHEMA, '{"type":"object"}')
    loose = replace(strict, is_strict=False)
    assert found == [None, OutputFormat(OutputKind.JSON_OBJECT), strict, loose, loose]


CALL = {"type": "function_call", "call_id": "1", "name": "n"}
REFUSED = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": {}}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [CALL]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": "{}", "name": "x" * 999}]}, "input[0].name"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "n"}]}, "input[0].input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"store": "yes"}, "store"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"include": "x"}, "include"),
    ({"include": [5]}, "include"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"truncation": "some"}, "truncation"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "n"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "n", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "custom", "name": "n", "format": "x"}]}, "tools[0].format"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {"x": [float("inf")]}}, "metadata"),
    ({"input": [{"role": "user", "content": "x", "more": float("-inf")}]}, "input"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda x: str(x)[:50])
def test_invalid_field_is_rejected_with_its_parameter(fields, param):
    with pytest.raises(RejectedError) as refused:
        parse(**fields)

    assert refused.value.status == 400
    assert refused.value.param == param


NAMES = [
    *("input", "instructions", "tools", "tool_choice", "reasoning", "metadata", "text", "include"),
    *("max_output_tokens", "temperature", "store", "stream", "stop", "user", "top_logprobs"),
]


@given(st.dictionaries(st.sampled_from(NAMES), ANY_JSON, max_size=4))
def test_arbitrary_fields_are_parsed_or_rejected(fields):
    with suppress(RejectedError):  # and nothing else
        parse(**fields)
