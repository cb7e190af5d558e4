"""Forced calls through the official SDKs of OpenAI and Anthropic, on real nodes."""

import json
import threading
import time
from collections.abc import Iterator

import anthropic
import jsonschema
import openai
import pytest

from node.mlx.engine import Engine
from tests.support.local_fabric import LocalFabric, local_fabric

USER = [{"role": "user", "content": "The vault code of Mira is otter. The vault code of Mira is"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 3, "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"at": {"enum": ["the sea"]}}, "required": ["at"]}
SCHEMAS = {"weather": WEATHER, "look": LOOK}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
BLOCKS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
# Bias that makes this model call without being forced.
TAUGHT = [
    {"role": "system", "content": f"To see say {CALL}"},
    {"role": "user", "content": "To see say"},
]
USUAL = {"model": "recall", "max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[LocalFabric]:
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "node-a", "node-b") as instance:
        yield instance


@pytest.fixture(scope="module")
def claude(fabric) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def checked_name(name, arguments):
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return name


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CHOICES = ["required", NAMED, allowed("required", "weather")]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
def test_chat_with_forced_choice_returns_valid_calls(fabric, choice, more):
    done = fabric.openai.chat.completions.create(
        **{**USUAL, **more}, messages=USER, tools=TOOLS, tool_choice=choice
    )
    (answer,) = done.choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    names = {checked_name(c.function.name, c.function.arguments) for c in answer.message.tool_calls}
    assert choice == "required" or names == {"weather"}


def streamed(fabric, agent, choice="required", **more):
    """Return each call's streamed name and arguments, and the finish reason."""
    stream = fabric.openai.chat.completions.create(
        **{**USUAL, **more},
        messages=USER,
        tools=TOOLS,
        tool_choice=choice,
        stream=True,
        extra_headers={"X-Agent-ID": agent},
    )
    calls, ends, pieces = {}, [], 0
    for chunk in stream:
        (answer,) = chunk.choices
        assert not answer.delta.content
        for part in answer.delta.tool_calls or []:
            name, arguments = calls.get(part.index, ("", ""))
            added = part.function.arguments or ""
            calls[part.index] = (name or part.function.name, arguments + added)
            pieces += bool(added)
        ends += [answer.finish_reason] if answer.finish_reason else []
    return list(calls.values()), ends, pieces


def test_streamed_call_arguments_arrive_in_pieces(fabric):
    calls, ends, pieces = streamed(fabric, "streamed", NAMED)
    assert ends == ["tool_calls"]
    assert [checked_name(*call) for call in calls] == ["weather"]
    assert pieces > 5


def test_parallel_tool_calls_false_returns_one_call(fabric):
    for seed in range(6):
        done = fabric.openai.chat.completions.create(
            **{**USUAL, "temperature": 1.5, "seed": seed},
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (call,) = done.choices[0].message.tool_calls
        checked_name(call.function.name, call.function.arguments)


def test_forced_calls_share_a_batch_with_other_answers(fabric):
    found = {}

    def ask(name, **more):
        body = {**USUAL, "max_tokens": 90 if name != "free" else 9}
        done = fabric.openai.chat.completions.create(**body, messages=USER, tools=TOOLS, **more)
        found[name] = done.choices[0]

    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    options = {
        "any": {"tool_choice": "required"},
        "named": {"tool_choice": NAMED},
        "free": {"tool_choice": "none"},
        "formatted": {"tool_choice": "none", "response_format": form},
    }
    threads = [threading.Thread(target=ask, args=(n,), kwargs=more) for n, more in options.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    reasons = {name: answer.finish_reason for name, answer in found.items()}
    assert reasons == {
        "any": "tool_calls",
        "named": "tool_calls",
        "free": "length",
        "formatted": "stop",
    }
    jsonschema.validate(json.loads(found["formatted"].message.content), WEATHER)
    assert found["free"].message.content.strip().startswith("otter")


def test_forced_call_survives_migration_and_restart(fabric, monkeypatch):
    more = {"temperature": 1.0, "seed": 11}
    stayed = streamed(fabric, "calm", NAMED, **more)
    launch = Engine.launch

    def slow(self, slots):
        time.sleep(0.03)
        launch(self, slots)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "launch", slow)
        receipts = []

        def move():
            time.sleep(0.4)
            owner = fabric.http.get("/v1/agents/moving").json()["owner"]
            target = "node-b" if owner == "node-a" else "node-a"
            receipts.append(fabric.migrate("moving", target))

        moving = threading.Thread(target=move)
        moving.start()
        moved = streamed(fabric, "moving", NAMED, **more)
        moving.join(60)
    assert [receipt["epoch"] for receipt in receipts] == [2]
    assert moved[:2] == stayed[:2]
    owner = fabric.http.get("/v1/agents/moving").json()["owner"]
    fabric.restart(owner)
    assert streamed(fabric, "moving", NAMED, **more)[:2] == stayed[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_api_returns_forced_call(fabric, stream):
    request_body = {
        "model": "recall",
        "input": USER,
        "tools": FLAT,
        "max_output_tokens": 400,
        "tool_choice": {"type": "function", "name": "weather"},
        "store": False,
    }
    if stream:
        with fabric.openai.responses.stream(**request_body) as events:
            done = events.get_final_response()
    else:
        done = fabric.openai.responses.create(**request_body)
    (call,) = done.output
    assert (done.status, call.type) == ("completed", "function_call")
    assert checked_name(call.name, call.arguments) == "weather"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}],
    ids=str,
)
def test_messages_api_returns_forced_tool_use(claude, choice, stream):
    request_body = {
        "model": "recall",
        "max_tokens": 400,
        "messages": USER,
        "tools": BLOCKS,
        "tool_choice": choice,
    }
    if stream:
        with claude.messages.stream(**request_body) as events:
            done = events.get_final_message()
    else:
        done = claude.messages.create(**request_body)
    assert done.stop_reason == "tool_use"
    assert {block.type for block in done.content} == {"tool_use"}
    for block in done.content:
        checked_name(block.name, json.dumps(block.input))
    assert choice["type"] == "tool" or len(done.content) == 1


def test_strict_tool_schema_applies_under_auto_tool_choice(fabric):
    request_body = {**USUAL, "messages": TAUGHT}
    loose = fabric.openai.chat.completions.create(**request_body, tools=TOOLS).choices[0].message
    assert json.loads(loose.tool_calls[0].function.arguments) == {"at": "the sky"}
    strict = [TOOLS[0], {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": True}}]
    bound = fabric.openai.chat.completions.create(**request_body, tools=strict).choices[0].message
    assert json.loads(bound.tool_calls[0].function.arguments) == {"at": "the sea"}
    free = fabric.openai.chat.completions.create(
        **{**USUAL, "max_tokens": 9}, messages=USER, tools=strict
    )
    assert free.choices[0].message.content.strip().startswith("otter")


def test_only_allowed_tools_are_called(fabric):
    request_body = {**USUAL, "messages": TAUGHT, "tools": TOOLS}
    for name in SCHEMAS:
        done = fabric.openai.chat.completions.create(
            **request_body, tool_choice=allowed("auto", name)
        )
        called = {c.function.name for c in done.choices[0].message.tool_calls}
        assert called == {name}


REFUSED = [
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=str)
def test_unenforceable_tools_are_a_bad_request(fabric, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.openai.chat.completions.create(**{**USUAL, "tools": TOOLS, **more}, messages=USER)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_unenforceable_tools_are_rejected_in_anthropic_shape(claude):
    bad = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "no"}}}}
    with pytest.raises(anthropic.BadRequestError, match="the tool 'f'"):
        claude.messages.create(
            model="recall", max_tokens=9, messages=USER, tools=[bad], tool_choice={"type": "any"}
        )


WRITE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
}
LIMITS = range(12, 28, 3)


def test_truncated_forced_call_is_equal_streamed_and_unstreamed(fabric):
    tool = {"type": "function", "function": {"name": "write_file", "parameters": WRITE}}
    shown = set()
    for limit in LIMITS:
        body = {
            "model": "recall",
            "messages": [{"role": "user", "content": "Write a long file."}],
            "tools": [tool],
            "tool_choice": "required",
            "max_tokens": limit,
            "temperature": 1.0,
            "seed": 5,
        }
        whole = fabric.openai.chat.completions.create(**body).choices[0]
        chunks = fabric.openai.chat.completions.create(**body, stream=True)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
        calls = whole.message.tool_calls or []
        assert whole.finish_reason == choices[-1].finish_reason == "length"
        assert not whole.message.content
        assert not any(choice.delta.content for choice in choices)
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert [call.function.arguments for call in calls] == ([arguments] if parts else [])
        shown.add(len(calls))
    assert 1 in shown


def test_truncated_forced_tool_use_is_one_block(fabric, claude):
    names = set()
    for limit in LIMITS:
        body = {
            "model": "recall",
            "messages": [{"role": "user", "content": "Write a long file."}],
            "tools": [{"name": "write_file", "input_schema": WRITE}],
            "tool_choice": {"type": "any"},
            "max_tokens": limit,
            "extra_body": {"temperature": 1.0},
        }
        with claude.messages.stream(**body) as stream:
            kinds = [e.delta.type for e in stream if e.type == "content_block_delta"]
            done = stream.get_final_message()
        whole = claude.messages.create(**body)
        for message in (done, whole):
            assert message.stop_reason == "max_tokens"
            names |= {block.type for block in message.content}
            assert not any(block.type == "text" and block.text for block in message.content)
        assert set(kinds) <= {"input_json_delta"}
    assert "tool_use" in names
