"""Custom tools of chats: requests, stream events and returned calls."""

import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice
from fabric.turn.generation import Finished, FinishReason, ToolCall, ToolCallPart, ToolCalls
from router.openai.chat_request import parse_chat
from tests.router.fake_node import MODEL
from tests.router.rig import rig
from tests.support.conversations import template_messages

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "patch it"}]
LOOK = {"type": "function", "function": {"name": "look"}}
TOOLS = [LOOK, {"type": "custom", "custom": {"name": "patch"}}]
CALLS = [
    ToolCallPart(0, "first", "patch", '{"input": "a'),
    ToolCallPart(1, "first", "", '\\nb"}'),
    ToolCalls((ToolCall("patch", '{"input": "a\\nb"}', "first"),)),
    ToolCallPart(2, "second", "look", "{"),
    ToolCallPart(3, "second", "", "}"),
    ToolCalls((ToolCall("look", "{}", "second"),)),
    Finished(FinishReason.TOOL_CALLS, 9),
]


def custom(**form):
    return {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", **form}}}


def parse(*tools, **more):
    return parse_chat({}, {"model": "m", "messages": USER, "tools": list(tools), **more})


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"grammar": {"syntax": "regex", "definition": "[a-z]+"}}, "^(?:[a-z]+)$"),
        ({"grammar": {"syntax": "regex", "definition": "^a|b$"}}, "^(?:a|b)$"),
        ({"grammar": {"syntax": "regex", "definition": r"a\$"}}, r"^(?:a\$)$"),
        ({"syntax": "regex", "definition": r"a\\$"}, r"^(?:a\\)$"),
        ({"syntax": "lark", "definition": 'start: "a"~2'}, "^(?:(?:(?:a){2}))$"),
    ],
    ids=str,
)
def test_grammar_becomes_pattern_of_input_argument(form, pattern):
    prompt = parse(LOOK, custom(**form)).prompt
    function = prompt.tools[1]["function"]
    assert function["parameters"]["properties"] == {"input": {"type": "string", "pattern": pattern}}
    assert function["parameters"]["required"] == ["input"]
    assert "follows this" in function["description"]
    assert prompt.calls == CallChoice(strict=("patch",))


@pytest.mark.parametrize(
    ("syntax", "definition", "rules"),
    [
        ("lark", 'start: "(" start ")" | "1"', r"r0: (/\(/ r0 /\)/|/1/)"),
        ("lark", "start: /x{2000}/ a\na: " + '"y" ' * 1_100, None),
        ("regex", "(ab)?" * 300, "r0: /" + "(ab)?" * 300 + "/"),
    ],
    ids=["round", "long", "long expression"],
)
def test_grammar_without_pattern_becomes_rules(syntax, definition, rules):
    prompt = parse(LOOK, custom(syntax=syntax, definition=definition)).prompt
    function = prompt.tools[1]["function"]
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "follows this" in function["description"]
    (text,) = prompt.calls.texts
    assert prompt.calls == CallChoice(strict=("patch",), texts=(text,))
    assert text.tool == "patch"
    assert rules is None or text.rules == rules


def test_custom_tool_without_grammar_accepts_any_text():
    prompt = parse(*TOOLS, {"type": "custom", "custom": {"name": "b", "format": {"type": "text"}}})
    assert prompt.prompt.calls == CallChoice()
    assert prompt.custom_tools == {"patch", "b"}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert parse(*TOOLS, tool_choice=choice).prompt.calls.names == ("patch",)


WRONG = [
    (custom(grammar={"syntax": "lark", "definition": "start: A\nA: A?"}), "grammar.definition"),
    (custom(grammar={"syntax": "lark", "definition": "start: start b"}), "grammar.definition"),
    (custom(grammar={"syntax": "lark", "definition": "start: ("}), "grammar.definition"),
    (custom(syntax="regex", definition="x" * 9_000), "definition"),
    (custom(syntax="ebnf", definition="x"), "syntax"),
    (custom(syntax="lark"), "definition"),
    ({"type": "custom", "custom": {"name": "a", "format": {"type": "json"}}}, "type"),
]


@pytest.mark.parametrize(("tool", "param"), WRONG, ids=str)
def test_invalid_grammar_is_rejected_with_its_parameter(tool, param):
    with pytest.raises(RejectedError) as caught:
        parse(tool)
    assert (int(caught.value.status), caught.value.param) == (
        *(400, f"tools[0].custom.format.{param}"),
    )


async def test_sdk_reads_custom_tool_input_as_text():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = CALLS
        done = await fabric.openai().chat.completions.create(
            model=MODEL, messages=USER, tools=TOOLS
        )
        patch, look = done.choices[0].message.tool_calls
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "patch", "a\nb")
    assert (look.type, look.function.arguments, look.id) == ("function", "{}", "second")


async def test_streamed_custom_tool_input_arrives_whole():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = CALLS
        stream = await fabric.openai().chat.completions.create(
            model=MODEL, messages=USER, tools=TOOLS, stream=True
        )
        parts = [
            part.model_dump(exclude_none=True)
            async for chunk in stream
            for part in chunk.choices[0].delta.tool_calls or []
        ]
    custom_part, *functions = parts
    assert custom_part == {
        "index": 0,
        "id": "first",
        "type": "custom",
        "custom": {"name": "patch", "input": "a\nb"},
    }
    assert [part["index"] for part in functions] == [1, 1]
    assert "".join(part["function"]["arguments"] for part in functions) == "{}"


def test_custom_tool_call_is_read_back_unchanged():
    call = {"type": "custom", "id": "first", "custom": {"name": "patch", "input": "a\nb"}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    request = parse_chat({}, {"model": "m", "messages": messages})
    (used,) = template_messages(request.prompt)[1]["tool_calls"]
    assert used["function"] == {"name": "patch", "arguments": {"input": "a\nb"}}
