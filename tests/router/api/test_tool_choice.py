"""The choice of tools that an answer calls, in both of OpenAI's APIs."""

import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice
from router.api.tool_choice import TOOL_CHOICE, call_choice

NAMES = ("look", "now")


def function(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def read(choice, names=NAMES, *, parallel=True, strict=()):
    if choice is not None:
        choice = TOOL_CHOICE.read(choice, "tool_choice")
    return call_choice(choice, names, parallel=parallel, strict=strict)


READ = [
    (None, CallChoice()),
    ("auto", CallChoice()),
    ("none", CallChoice()),
    ("required", CallChoice(must_call=True)),
    (function("now"), CallChoice(must_call=True, names=("now",), takes_one=True)),
    (
        {"type": "function", "name": "now"},
        CallChoice(must_call=True, names=("now",), takes_one=True),
    ),
    (allowed("auto", "now"), CallChoice(names=("now",))),
    (allowed("required", "now", "look", "now"), CallChoice(True, ("now", "look"))),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        CallChoice(names=("look",)),
    ),
]


@pytest.mark.parametrize(("choice", "expected"), READ, ids=str)
def test_tool_choice_is_read_in_both_spellings(choice, expected):
    reads_calls, calls = read(choice)
    assert (reads_calls, calls) == (choice != "none", expected)


@pytest.mark.parametrize("choice", ["auto", "required", allowed("auto", "now")])
def test_parallel_tool_calls_false_limits_to_one_call(choice):
    for parallel, takes_one in ((True, False), (False, True)):
        _, calls = read(choice, parallel=parallel, strict=("now",))
        assert (calls.takes_one, calls.strict) == (takes_one, ("now",))


REFUSED = [
    ("some", "tool_choice"),
    (3, "tool_choice"),
    ({}, "tool_choice.type"),
    ({"type": "web_search"}, "tool_choice.type"),
    ({"type": "mcp", "server_label": "x"}, "tool_choice.type"),
    ({"type": "function"}, "tool_choice.name"),
    ({"type": "function", "name": 3}, "tool_choice.name"),
    ({"type": "function", "name": "x"}, "tool_choice.name"),
    (function("x"), "tool_choice.function.name"),
    (allowed("any", "now"), "tool_choice.allowed_tools.mode"),
    (allowed("auto"), "tool_choice.allowed_tools.tools"),
    (allowed("auto", "x"), "tool_choice.allowed_tools.tools[0].function.name"),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        "tool_choice.tools",
    ),
]


@pytest.mark.parametrize(("choice", "param"), REFUSED, ids=str)
def test_invalid_tool_choice_is_rejected_with_its_parameter(choice, param):
    with pytest.raises(RejectedError) as caught:
        read(choice)
    assert (int(caught.value.status), caught.value.param) == (400, param)


def test_required_call_needs_tools():
    with pytest.raises(RejectedError, match="only allowed with tools"):
        read("required", ())
