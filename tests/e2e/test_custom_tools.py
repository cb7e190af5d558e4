"""Custom tools with grammars, through OpenAI's SDK, on a real node."""

import re

import openai
import pytest

from tests.support.local_fabric import local_fabric
from tests.support.samples import sample

USER = [{"role": "user", "content": "The vault code of Mira is otter. The vault code of Mira is"}]
PATCH = """
start: begin_patch hunk~1..2 end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " /[a-z]{1,6}/ LF ("+" /.{0,9}/ LF){1,2}
%import common.LF
"""
PATCHED = (
    r"\*\*\* Begin Patch\n(\*\*\* Add File: [a-z]{1,6}\n(\+.{0,9}\n){1,2}){1,2}\*\*\* End Patch\n?"
)
ROUND = 'start: "(" start "," start ")" | "\\"" start "\\"" | /[a-c\\\\]{1,3}/'


def is_patched(text):
    return re.fullmatch(PATCHED, text)


def is_short(text):
    return re.fullmatch("(ab|c){2,4}", text)


def is_balanced(text):
    text, before = re.sub(r"[a-c\\]{1,3}", "x", text), None
    while before != text:
        before, text = text, re.sub(r'\(x,x\)|"x"', "x", text)
    return text == "x"


GRAMMARS = {
    "patch": ("lark", PATCH, is_patched),
    "expression": ("regex", "(ab|c){2,4}", is_short),
    "round": ("lark", ROUND, is_balanced),
}
CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "the sea"}}\n</tool_call>'
# Bias that makes this model call without being forced.
TAUGHT = [
    {"role": "system", "content": f"To see say {CALL}"},
    {"role": "user", "content": "To see say"},
]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "node-a") as instance:
        yield instance


def flat(syntax, definition):
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "format": form}


def nested(syntax, definition):
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": form}}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", sample([3, 4], 3))
def test_custom_tool_input_follows_its_grammar(fabric, name, seed):
    syntax, definition, fits = GRAMMARS[name]
    usual = {"model": "recall", "temperature": 1.0, "seed": seed}
    chat = fabric.openai.chat.completions.create(
        **usual,
        max_tokens=600,
        messages=USER,
        tools=[nested(syntax, definition)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = chat.choices[0].message.tool_calls
    assert fits(call.custom.input)

    with fabric.openai.responses.stream(
        model="recall",
        temperature=1.0,
        extra_body={"seed": seed},
        max_output_tokens=600,
        input=USER,
        tools=[flat(syntax, definition)],
        tool_choice={"type": "custom", "name": "patch"},
        store=False,
    ) as events:
        (item,) = events.get_final_response().output
    assert (item.type, item.name) == ("custom_tool_call", "patch")
    assert fits(item.input)


def test_grammar_applies_to_calls_under_auto_tool_choice(fabric):
    usual = {"model": "recall", "max_tokens": 200, "temperature": 0, "messages": TAUGHT}
    free = fabric.openai.chat.completions.create(
        **usual, tools=[{"type": "custom", "custom": {"name": "patch"}}]
    )
    assert free.choices[0].message.tool_calls[0].custom.input == "the sea"
    bound = fabric.openai.chat.completions.create(**usual, tools=[nested("regex", "the sky")])
    assert bound.choices[0].message.tool_calls[0].custom.input == "the sky"


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("lark", 'start: "(" start ")" | /(?=a)b/', "lookaround"),
        ("lark", 'start: A start | "1"\nA: "(" A', "refers to itself"),
        ("lark", 'start: "1" start', "no finite text matches"),
        ("lark", 'start: "(', "line 1 of the grammar"),
        ("regex", "(a", "cannot be enforced"),
        ("regex", "(?=a)b", "look"),
    ],
)
def test_invalid_grammar_is_rejected_with_reason(fabric, syntax, definition, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        fabric.openai.chat.completions.create(
            model="recall", messages=USER, tools=[nested(syntax, definition)]
        )
