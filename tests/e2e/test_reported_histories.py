"""Histories that users of other servers report as refused: every family's template accepts them."""

import json

import pytest

from node.mlx.chat_tokenizer import ChatTokenizer
from router.anthropic.request import parse_request
from router.openai.chat_request import parse_chat
from router.openai.responses.request import parse_responses
from tests.node.mlx.test_family_templates import FAMILIES
from tests.support.call_shapes import CALL_SHAPES
from tests.support.chat_models import (
    CODER,
    MISTRAL,
    MISTRAL_SPECIALS,
    QWEN_SPECIALS,
    chat_tokenizer,
)
from tests.support.conversations import template_messages
from tests.support.template_shapes import SHAPES

TEMPLATES = {
    **{name: (each.template, each.specials, each.end) for name, each in CALL_SHAPES.items()},
    **{f"family {n}": (each.template, each.specials, each.end) for n, each in FAMILIES.items()},
    **{f"shape {n}": (each.template, each.specials, each.end) for n, each in SHAPES.items()},
    "strict coder": (CODER, QWEN_SPECIALS, "<|im_end|>"),
    "strict mistral": (MISTRAL, MISTRAL_SPECIALS, "</s>"),
}
ASK, LATER, FOUND = "Write the file.", "And the other?", "It is there."
# Arguments of a call as models break them, and as clients send them back.
BROKEN = {
    "cut": '{"path": "a',
    "a number": "5",
    "a list": '["a"]',
    "a string": '"a"',
    "null": "null",
    "blank": " ",
    "empty": "",
    "two objects": '{"path": "a"}{"path": "b"}',
    "no JSON": "path=a",
    "twice the same key": '{"path": "a", "path": "b"}',
}


def call(name, arguments='{"path": "a"}'):
    return {"id": name, "type": "function", "function": {"name": "write", "arguments": arguments}}


def calls(*names, arguments='{"path": "a"}', content=None):
    uses = [call(name, arguments) for name in names]
    return {"role": "assistant", "content": content, "tool_calls": uses}


def user(text):
    return {"role": "user", "content": text}


def result(name):
    return {"role": "tool", "tool_call_id": name, "content": FOUND}


ANSWER = {"role": "assistant", "content": "So."}


def system(text):
    return {"role": "system", "content": text}


HISTORIES = {
    "a call without a result": [user(ASK), calls("c1"), user(LATER)],
    "a result and the user's interruption": [user(ASK), calls("c1"), result("c1"), user(LATER)],
    "two calls and one result": [user(ASK), calls("c1", "c2"), result("c1"), user(LATER)],
    "a result without a call": [user(ASK), ANSWER, result("c9"), user(LATER)],
    "a result before everything": [result("c9"), user(LATER)],
    "a result after the next question": [user(ASK), calls("c1"), user(LATER), result("c1")],
    "a loop that is interrupted twice": [
        *(user(ASK), calls("c1"), result("c1"), user("Stop."), ANSWER),
        *(user("Go."), calls("c2", "c3"), result("c2"), result("c3"), user("Stop."), user(LATER)),
    ],
    "a reminder after a result": [user(ASK), calls("c1"), result("c1"), system(LATER)],
    "a greeting": [ANSWER, user(LATER)],
    "a text and then its call": [user(ASK), ANSWER, calls("c1"), result("c1"), user(LATER)],
    "a result that comes twice": [user(ASK), calls("c1"), result("c1"), result("c1"), user(LATER)],
}


def chat(messages):
    return template_messages(parse_chat({}, {"model": "m", "messages": messages}).prompt)


def responses(messages):
    items = []
    for each in messages:
        if each["role"] == "tool":
            output = {"call_id": each["tool_call_id"], "output": each["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if each["content"] is not None:
            items.append({"type": "message", "role": each["role"], "content": each["content"]})
        items += [
            {"type": "function_call", "call_id": use["id"], **use["function"]}
            for use in each.get("tool_calls", ())
        ]
    return template_messages(parse_responses({}, {"model": "m", "input": items}).prompt)


def messages(conversation):
    turns = []
    for each in conversation:
        if each["role"] == "tool":
            found = {"tool_use_id": each["tool_call_id"], "content": each["content"]}
            turns.append({"role": "user", "content": [{"type": "tool_result", **found}]})
            continue
        text = each["content"]
        blocks = [] if text is None else [{"type": "text", "text": text}]
        for use in each.get("tool_calls", ()):
            block = {"name": "write", "input": json.loads(use["function"]["arguments"])}
            blocks.append({"type": "tool_use", "id": use["id"], **block})
        turns.append({"role": each["role"], "content": blocks})
    read = parse_request({}, {"model": "m", "max_tokens": 9, "messages": turns})
    return template_messages(read.prompt)


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request, tmp_path_factory) -> ChatTokenizer:
    template, specials, end = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    return chat_tokenizer(folder, template, (*specials, end), end=end)


@pytest.mark.parametrize("dialect", [chat, responses])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_call_arguments_do_not_end_the_conversation(tokenizer, name, dialect):
    conversation = [
        user(ASK),
        calls("c1", arguments=BROKEN[name]),
        result("c1"),
        ANSWER,
        user(LATER),
    ]
    text = tokenizer.render(dialect(conversation), None, {})

    assert text.index(ASK) < text.index(LATER)


@pytest.mark.parametrize("dialect", [chat, responses, messages])
@pytest.mark.parametrize("name", HISTORIES)
def test_unusual_message_orders_are_read(tokenizer, name, dialect):
    text = tokenizer.render(dialect(HISTORIES[name]), None, {})

    assert LATER in text
