import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice, OutputFormat, OutputKind
from fabric.turn.generation import Identity, IdentityKind, ThoughtLimit
from router.anthropic.request import parse_request
from tests.support.any_json import ANY_JSON
from tests.support.conversations import template_messages

SMALLEST = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "look", "description": "see", "input_schema": {"type": "object"}}


def parse(headers=None, **fields):
    return parse_request(headers or {}, {**SMALLEST, **fields})


def messages(*conversation, **fields):
    return template_messages(parse(messages=list(conversation), **fields).prompt)


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(content, **more):
    return {"type": "text", "text": content, **more}


def test_smallest_request_gets_defaults():
    request = parse()

    assert (request.model, request.sampling.max_tokens) == ("m", 9)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (
        1,
        1,
        0,
    )
    assert request.identity == Identity(IdentityKind.CONTENT)
    assert not request.stream
    assert not request.shows_thoughts
    assert request.prompt.tools is None
    assert request.prompt.template_options == {"enable_thinking": False, "thinking": False}
    assert request.ignored == ()


def test_all_known_fields_are_read():
    request = parse(
        system=[text("be brief", cache_control={"type": "ephemeral", "ttl": "1h"})],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["a", "b"],
        stream=True,
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "max"},
        metadata={"user_id": "ada"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        chat_template_kwargs={"a": 1},
        some_beta_field={"x": [1]},
    )

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert sampling.stop == ("a", "b")
    assert request.stream
    assert request.prompt.calls == CallChoice(takes_one=True)
    assert request.shows_thoughts
    assert request.retain_s == 3600.0  # the longest of both
    assert request.identity == Identity(IdentityKind.GROUP, "ada")
    assert request.prompt.template_options == {
        "a": 1,
        "enable_thinking": True,
        "reasoning_effort": "high",
        "thinking": True,
        "thinking_budget": 2000,
    }
    assert request.prompt.tools == [
        {
            "type": "function",
            "function": {"name": "look", "description": "see", "parameters": {"type": "object"}},
        }
    ]
    assert sampling.thoughts == ThoughtLimit(2000, "max")
    assert request.ignored == ()


def test_tool_round_becomes_calls_and_results():
    found = messages(
        user(text("go")),
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("Let me see."),
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}},
            {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue", "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("a"), text("b")]},
            {"type": "tool_result", "tool_use_id": "toolu_3"},
            text("and now?"),
        ),
    )

    call = {"type": "function", "id": "toolu_1"}
    assert found == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {**call, "function": {"name": "look", "arguments": {"at": "sky"}}},
                {**call, "id": "toolu_2", "function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "a\nb", "tool_call_id": "toolu_2"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_3"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize("beta", [True, False])
def test_output_schema_is_read_from_both_fields(beta):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {}}}}
    request = parse(output_format=form) if beta else parse(output_config={"format": form})
    source = '{"type":"object","properties":{"a":{}}}'

    assert request.sampling.output == OutputFormat(OutputKind.JSON_SCHEMA, source)
    assert parse().sampling.output is None


def test_adjacent_messages_of_one_role_merge_but_tool_results_do_not():
    found = messages(
        user(text("a"), text("b")),
        {"role": "user", "content": "c"},
        assistant(text("d"), text("e")),
        user({"type": "tool_result", "tool_use_id": "1"}),
        user({"type": "tool_result", "tool_use_id": "2"}),
    )

    assert [(m["role"], m["content"]) for m in found] == [
        ("user", "a\nb\nc"),
        ("assistant", "de"),
        ("tool", ""),
        ("tool", ""),
    ]


def test_billing_header_line_is_dropped_and_listed_as_ignored():
    billing = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli"
    beginning = parse(system=[text(billing), text("You help."), text("Really.")])
    beside = parse(system=f"{billing}\nYou help.")
    alone = parse(system=billing)
    in_message = parse(system="", messages=[{"role": "user", "content": f"{billing}\nwhat is it?"}])

    assert template_messages(beginning.prompt)[0]["content"] == "You help.\nReally."
    assert template_messages(beside.prompt)[0]["content"] == "You help."
    assert [m["role"] for m in template_messages(alone.prompt)] == ["user"]
    assert beginning.ignored == alone.ignored == ("x-anthropic-billing-header",)
    assert template_messages(in_message.prompt)[0]["content"].startswith(
        "x-anthropic-billing-header"
    )
    assert in_message.ignored == ()


def test_mid_conversation_system_message_keeps_its_position():
    found = messages(user(text("a")), {"role": "system", "content": "b"}, system="s")

    assert [m["role"] for m in found] == ["system", "user", "system"]


@pytest.mark.parametrize(
    ("metadata", "agent"),
    [
        ({"user_id": "ada"}, "ada"),
        ({"agent_id": "mira", "user_id": "ada"}, "mira"),
        ({"user_id": json.dumps({"device_id": "d", "session_id": "s-1"})}, "s-1"),
        ({"user_id": ""}, None),
    ],
)
def test_identity_is_read_from_metadata(metadata, agent):
    kind = IdentityKind.CONTENT if agent is None else IdentityKind.GROUP
    assert parse(metadata=metadata).identity == Identity(kind, agent)


def test_malformed_json_user_id_names_a_group():
    for odd in ("{", '{"session_id": 5}', '{"session_id": ""}'):
        assert parse(metadata={"user_id": odd}).identity.kind is IdentityKind.GROUP


def test_tool_choice_none_keeps_tools_in_prompt_but_parses_no_calls():
    none = parse(tools=[TOOL], tool_choice={"type": "none"}).prompt
    auto = parse(tools=[TOOL], tool_choice={"type": "auto"}).prompt

    assert none.tools == auto.tools
    assert (none.reads_calls, auto.reads_calls) == (False, True)


CHOICES = [
    (None, CallChoice(strict=("b",))),
    ({"type": "auto"}, CallChoice(strict=("b",))),
    ({"type": "any"}, CallChoice(True, (), ("b",))),
    (
        {"type": "any", "disable_parallel_tool_use": True},
        CallChoice(True, (), ("b",), takes_one=True),
    ),
    ({"type": "tool", "name": "a"}, CallChoice(True, ("a",), ("b",))),
    ({"type": "none"}, CallChoice()),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES, ids=str)
def test_tool_choice_sets_required_and_strict_calls(choice, expected):
    tools = [{**TOOL, "name": "a"}, {**TOOL, "name": "b", "strict": True}]
    prompt = parse(tools=tools, tool_choice=choice).prompt
    assert prompt.calls == expected
    assert "strict" not in prompt.tools[1]["function"], "templates would print it"


DEEP = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
REFUSED = [
    ({"model": None}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0, "stream": True}, "max_tokens"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [user("x")]}, "messages[0].content[0]"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [user({"type": "tool_use"})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    (
        {
            "messages": [
                user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "thinking"}]})
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    (
        {"messages": [assistant({"type": "tool_use", "id": "1", "name": "n", "input": "x"})]},
        "messages[0].content[0].input",
    ),
    (
        {"messages": [assistant({"type": "tool_use", "name": "n", "input": {}})]},
        "messages[0].content[0].id",
    ),
    (
        {"messages": [assistant({"type": "tool_use", "id": "1", "name": "n", "input": {}})]},
        "messages",
    ),
    ({"messages": [assistant(text(""))]}, "messages"),
    (
        {
            "messages": [user(text("x")), assistant(text("begun"))],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "output_config.format",
    ),
    ({"messages": [user(text("x", cache_control={"type": "y"}))]}, None),
    ({"messages": [user(text("x", cache_control={"type": "ephemeral", "ttl": "9d"}))]}, None),
    ({"system": 5}, "system"),
    ({"system": [{"type": "tool_use"}]}, "system[0].type"),
    ({"system": [{"type": 5}]}, "system[0].type"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "Custom", "name": "look", "input_schema": {}}]}, "tools[0].type"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    (
        {"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice.name",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "look"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": "json"}}, "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": DEEP}}, "output_format.schema"),
    ({"fallbacks": [{"model": "x"}]}, "fallbacks"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda x: str(x)[:50])
def test_invalid_field_is_rejected_with_its_parameter(fields, param):
    with pytest.raises(RejectedError) as refused:
        parse(**fields)

    assert refused.value.status == 400
    named = param or "messages[0].content[0].cache_control"
    assert refused.value.param.startswith(named)
    assert refused.value.param in refused.value.message


NAMES = [
    *("messages", "system", "tools", "tool_choice", "thinking", "metadata", "output_config"),
    *("stop_sequences", "max_tokens", "temperature", "top_k", "cache_control", "stream"),
]


@given(st.dictionaries(st.sampled_from(NAMES), ANY_JSON, max_size=4))
def test_arbitrary_fields_are_parsed_or_rejected(fields):
    with suppress(RejectedError):  # and nothing else
        parse(**fields)
