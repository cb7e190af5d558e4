"""Templates' input and conversations' sketches keep their bytes.

A changed byte in either would make stored agents cold. After an intended change,
`python -m tests.router.openai.test_conversation_bytes` rewrites the file.
"""

import hashlib
import json
import random
from pathlib import Path

import pytest

from fabric.errors import RejectedError
from router.openai.chat_request import parse_chat
from tests.support.conversations import template_messages

PATH = Path(__file__).with_name("conversation_bytes.json")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":[2.0]}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}]
LONG = "é" * 700


def user(content="hi", **more):
    return {"role": "user", "content": content, **more}


def assistant(content="", **more):
    return {"role": "assistant", "content": content, **more}


def calling(arguments, **more):
    return assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}, **more}])


SHAPES = {
    "one user": [user()],
    "every role": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        user(),
        assistant("Hello."),
        {"role": "tool", "content": "42"},
    ],
    "long and not ASCII": [user(LONG), assistant("\U0001f600\u2028\x00"), user("größer")],
    "empty texts": [user(""), assistant("")],
    "a name": [
        user(name="mira"),
        assistant("x", name=""),
        {"role": "tool", "content": "", "name": "f"},
    ],
    "unknown fields": [user(cache_control={"type": "ephemeral"}, weight=1)],
    "keys in another order": [{"content": "hi", "name": "mira", "role": "user"}],
    "parts": [
        user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]),
        assistant([{"type": "refusal", "refusal": "no"}, {"type": "text", "text": " way"}]),
        user([]),
        user(["a", "", "b"]),
    ],
    "no content": [assistant(None), {"role": "assistant"}, user()],
    "reasoning": [
        assistant("4", reasoning_content="2+2"),
        assistant("4", reasoning_content=""),
        assistant("4", reasoning_content=None),
        user(reasoning_content="is no assistant's"),
    ],
    "a call and its result": [
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "", "content": [{"type": "text", "text": "42"}]},
    ],
    "calls beside text and reasoning": [
        assistant("Let me see.", reasoning_content="hm", tool_calls=[CALL, CALL], name="a"),
    ],
    "no calls": [assistant("x", tool_calls=[]), assistant("x", tool_calls=None)],
    "calls of others": [user(tool_calls=[{"nonsense": 1}], tool_call_id="x")],
    "arguments": [
        calling(None),
        calling({}),
        calling({"z": {"y": [1, -2.5, True, None, "é"]}, "a": 1e300}),
        calling('{"z": 1, "a": {"deep": [[[]]]}}'),
        calling('{"big": 123456789012345678901234567890, "small": 1e-7}'),
        calling("{}", id="c2", type="function"),
        calling("", id=""),
        calling('{"a":'),
        calling("[1]"),
        calling('"x"'),
        calling('{"a":1,"a":2}'),
        calling("NaN"),
        calling(" { } "),
    ],
}


def random_conversation(seed):
    """Generate a random conversation that is valid, or nearly so."""
    rng = random.Random(seed)

    def text():
        return rng.choice(
            ["", "a", "é\n", " x ", "\U0001f600", '{"k": 1}', "w " * rng.randint(1, 900)]
        )

    def content():
        options = [None, text(), text(), [text(), {"type": "text", "text": text()}], []]
        return rng.choice(options)

    def arguments():
        plain = {text()[:9]: rng.choice([1, 2.5, None, [text()], {"k": text()}]) for _ in range(3)}
        return rng.choice([None, plain, json.dumps(plain), json.dumps(plain)[:-1], "[]"])

    def call():
        options = {"function": {"arguments": arguments(), "name": rng.choice(["f", "g", ""])}}
        return options | rng.choice([{}, {"id": text()[:9]}, {"type": "function", "id": None}])

    def message():
        role = rng.choice(["system", "developer", "user", "assistant", "assistant", "tool"])
        calls = [call() for _ in range(rng.randint(0, 3))] if role == "assistant" else []
        more = {
            "name": text()[:9],
            "reasoning_content": text(),
            "tool_calls": calls,
            "tool_call_id": text()[:9],
        }
        kept = {name: value for name, value in more.items() if rng.random() < 0.4}
        return {"content": content(), "role": role, **kept}

    return [message() for _ in range(rng.randint(1, 8))]


def template_input(messages, tools=None):
    prompt = parse_chat({}, {"model": "m", "messages": messages, "tools": tools}).prompt
    return {
        "given": [json.dumps(message) for message in template_messages(prompt)],
        "sketch": [f"{piece:x}" for piece in prompt.sketch],
        "opening": f"{prompt.opening:x}",
        "bytes_count": prompt.bytes_count,
    }


def current():
    shapes = {name: template_input(messages) for name, messages in SHAPES.items()}
    shapes["tools"] = template_input(SHAPES["every role"], TOOLS)
    return {**shapes, "drawn": digest(range(2000))}


def digest(seeds):
    """Return the number of accepted conversations and one digest of all."""
    state, count = hashlib.blake2b(digest_size=16), 0
    for seed in seeds:
        try:
            answer = template_input(random_conversation(seed), TOOLS if seed % 3 == 0 else None)
        except RejectedError as error:
            answer = [error.param, error.message]
        else:
            count += 1
        state.update(json.dumps(answer).encode())
    return [count, state.hexdigest()]


@pytest.mark.parametrize("name", [*SHAPES, "tools"])
def test_template_input_of_each_shape_matches_golden_bytes(name):
    tools = TOOLS if name == "tools" else None
    found = template_input(SHAPES.get(name, SHAPES["every role"]), tools)

    assert found == json.loads(PATH.read_text())[name]


def test_template_input_of_2000_conversations_matches_golden_digest():
    assert digest(range(2000)) == json.loads(PATH.read_text())["drawn"]


if __name__ == "__main__":
    PATH.write_text(json.dumps(current(), indent=1) + "\n")
