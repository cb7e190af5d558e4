"""Parsed calls, texts and thoughts of every family, in each dialect, whole and streamed.

The fabric is real; only the sampled tokens are scripted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from fabric.turn.partial_json import whole_members
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.support.agent_traffic import corpus
from tests.support.call_shapes import CALL_SHAPES, CallShape
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.scripted_answers import Script, scripted
from tests.support.template_shapes import write_shape

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path"],
}
READ = ("read", {"path": "\na b\n", "lines": 3})
OTHER = ("read", {"path": "c"})
QUESTION = "What is in it?"
# Shapes tested in every run: with a header after each result, without, and with channels.
USUAL = ("qwen3", "gemma4", "minimax_m3")
NIGHTLY = [pytest.mark.nightly, pytest.mark.slow]


@dataclass
class Seen:
    """Parts of an answer as a client receives them."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class State:
    """A conversation's last message, the scripted answer, and what clients see."""

    answer: str
    seen: Seen
    result: str | None = None  # a tool's result before the answer; None: the first answer
    cut_at: int = 0  # characters of `answer` that the token limit allows; 0: all


def states(shape: CallShape) -> dict[str, State]:
    """Return the states of one family; answers lack the end mark."""
    is_harmony = shape.name == "harmony"

    def thinks(thought: str, *, later: bool = False) -> str:
        return shape.thinks(thought, after_result=later)

    def speaks(text: str) -> str:
        header = "<|start|>assistant<|channel|>final<|message|>" if is_harmony else ""
        return header + text

    hostile = shape.calls(READ) + shape.thought[1] + shape.end + shape.thought[0]
    cut = thinks("Hm.") + shape.calls(READ)
    found = {
        "first": State(thinks("Hm.") + speaks("So."), Seen("So.", "Hm.", [], "stop")),
        "call": State(thinks("Hm.") + shape.calls(READ), Seen("", "Hm.", [READ], "calls")),
        "parallel": State(
            thinks("Hm.") + shape.calls(READ, OTHER), Seen("", "Hm.", [READ, OTHER], "calls")
        ),
        "after a result": State(
            thinks("Hm.", later=True) + speaks("So."), Seen("So.", "Hm.", [], "stop"), "text"
        ),
        "call after a hostile result": State(
            thinks("Hm.", later=True) + shape.calls(READ),
            Seen("", "Hm.", [READ], "calls"),
            hostile,
        ),
        "cut": State(cut, Seen("", "Hm.", [], "cut"), cut_at=cut.index("a b") + 2),
        "cut in its name": State(
            cut, Seen("", "Hm.", [], "cut"), cut_at=cut.index("read") + len("re")
        ),
    }
    if not is_harmony:
        quote = f"So: {shape.calls(READ)} I think."
        found["quoted"] = State(thinks(quote) + "Yes.", Seen("Yes.", quote, [], "stop"))
    return found


def read_events(text: str) -> list[tuple[str, Any]]:
    """Return a stream's events: their names, if any, and their data."""
    events = []
    for frame in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if line[:1] != ":")
        if fields.get("data", "[DONE]") != "[DONE]":
            events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


@dataclass(frozen=True)
class World:
    """A fabric with a scripted model of one family."""

    fabric: LocalFabric
    shape: CallShape
    script: Script
    tokenizer: ChatTokenizer

    def prepare(self, state: State) -> int:
        """Script an answer; return its token limit."""
        cut = state.answer[: state.cut_at] if state.cut_at else ""
        ids = self.tokenizer.encode(cut or state.answer).ids
        self.script.end = self.tokenizer.encode(self.shape.end).ids[0]
        self.script.tokens.clear()
        self.script.tokens.extend(ids)
        return len(ids) if cut else len(ids) + 8

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = self.fabric.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return read_events(response.text) if body.get("stream") else response.json()


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in USUAL else NIGHTLY) for n in CALL_SHAPES],
)
def world(request, tmp_path_factory) -> Iterator[World]:
    shape = CALL_SHAPES[request.param]
    folder = tmp_path_factory.mktemp("calls")
    model = write_shape(folder / "model", shape.shape, "full", corpus())
    with scripted() as script, local_fabric(folder, str(model), "node-a") as fabric:
        yield World(fabric, shape, script, ChatTokenizer(load(model)))


def chat(world: World, state: State, stream: bool) -> Seen:
    tool = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    if state.result is not None:
        function = {"name": "read", "arguments": json.dumps(OTHER[1])}
        uses = [{"id": "abcdefghi", "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": uses},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": state.result},
        ]
    limit = world.prepare(state)
    body = {"model": "model", "messages": messages, "tools": [tool], "max_tokens": limit}
    payload = world.post("/v1/chat/completions", {**body, "stream": stream})
    seen, calls = Seen(), {}
    for choice in (
        [c for _, e in payload if e for c in e["choices"]] if stream else payload["choices"]
    ):
        message = choice["delta" if stream else "message"]
        seen.text += message.get("content") or ""
        seen.thought += message.get("reasoning_content") or ""
        for number, call in enumerate(message.get("tool_calls") or []):
            name, arguments = calls.get(call.get("index", number), ("", ""))
            part = call["function"]
            name += part.get("name", "")
            calls[call.get("index", number)] = name, arguments + part["arguments"]
        seen.reason = choice["finish_reason"] or seen.reason
    seen.calls = list(calls.values())
    seen.reason = {"tool_calls": "calls", "length": "cut"}.get(seen.reason, seen.reason)
    return seen


def responses(world: World, state: State, stream: bool) -> Seen:
    tool = {"type": "function", "name": "read", "parameters": PARAMETERS}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    if state.result is not None:
        call = {"call_id": "abcdefghi", "name": "read", "arguments": json.dumps(OTHER[1])}
        items += [
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "abcdefghi", "output": state.result},
        ]
    limit = world.prepare(state)
    body = {"model": "model", "input": items, "tools": [tool], "max_output_tokens": limit}
    payload = world.post("/v1/responses", {**body, "stream": stream})
    response = payload[-1][1]["response"] if stream else payload
    if stream:  # the deltas add up to the final event
        deltas = [e for kind, e in payload if kind.endswith("arguments.delta")]
        done = [item for item in response["output"] if item["type"] == "function_call"]
        for item in done:
            parts = [e["delta"] for e in deltas if e["item_id"] == item["id"]]
            assert "".join(parts) == item["arguments"]
    seen = Seen()
    for item in response["output"]:
        if item["type"] == "function_call":
            seen.calls.append((item["name"], item["arguments"]))
        else:
            text = "".join(part["text"] for part in item["content"])
            seen.thought += text if item["type"] == "reasoning" else ""
            seen.text += text if item["type"] == "message" else ""
    statuses = [i["status"] for i in response["output"] if i["type"] != "reasoning"]
    is_cut = response["status"] == "incomplete"
    assert statuses == ["completed"] * (len(statuses) - 1) + [
        "incomplete" if is_cut else "completed"
    ]
    seen.reason = "cut" if response["status"] == "incomplete" else "calls" if seen.calls else "stop"
    return seen


def messages(world: World, state: State, stream: bool) -> Seen:
    tool = {"name": "read", "input_schema": PARAMETERS}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    if state.result is not None:
        use = {"type": "tool_use", "id": "abcdefghi", "name": "read", "input": OTHER[1]}
        result = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": state.result}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    limit = world.prepare(state)
    body = {"model": "model", "messages": turns, "tools": [tool], "max_tokens": limit}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    payload = world.post("/v1/messages", {**body, "stream": stream})
    content, reason = _blocks(payload) if stream else (payload["content"], payload["stop_reason"])
    seen = Seen()
    for block in content:
        match block["type"]:
            case "text":
                seen.text += block["text"]
            case "thinking":
                seen.thought += block["thinking"]
            case _:
                spelled = block.get("spelled", json.dumps(block["input"]))
                seen.calls.append((block["name"], spelled))
    seen.reason = {"tool_use": "calls", "max_tokens": "cut"}.get(reason, "stop")
    return seen


_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def _blocks(events: list[Any]) -> tuple[list[Any], str]:
    """Add up a stream's blocks; a delta belongs to the block that is open."""
    blocks: list[Any] = []
    is_open, reason = False, ""
    for kind, event in events:
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "spelled": ""})
            is_open = True
        elif kind == "content_block_stop":
            assert is_open
            assert event["index"] == len(blocks) - 1
            is_open = False
        elif kind == "content_block_delta":
            block, delta = blocks[-1], event["delta"]
            assert is_open
            assert event["index"] == len(blocks) - 1
            if delta["type"] == "signature_delta":
                continue
            assert delta["type"] == _DELTAS[block["type"]]
            key = {"text": "text", "thinking": "thinking"}.get(block["type"], "spelled")
            block[key] += next(value for name, value in delta.items() if name != "type")
        elif kind == "message_delta":
            reason = event["delta"]["stop_reason"]
    assert not is_open
    return blocks, reason


_AGENTS = iter(range(10_000))


def generate(world: World, state: State, stream: bool) -> Seen:
    tool = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
    path = f"/v1/agents/reader-{next(_AGENTS)}/generate"
    body = {"messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    if state.result is not None:
        first = State(world.shape.calls(OTHER), Seen())
        limit = world.prepare(first)
        called = world.post(path, {**body, "model": "model", "max_tokens": limit})
        (call,) = called["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": state.result}
        body["messages"] = [result]
    limit = world.prepare(state)
    payload = world.post(path, {**body, "model": "model", "max_tokens": limit, "stream": stream})
    if not stream:
        calls = [(call["name"], call["arguments"]) for call in payload["tool_calls"]]
        reason, text, thought = payload["finish_reason"], payload["text"], payload["reasoning"]
    else:
        text = "".join(e["text"] for kind, e in payload if kind == "text")
        thought = "".join(e["text"] for kind, e in payload if kind == "reasoning")
        calls = [(e["name"], e["arguments"]) for kind, e in payload if kind == "tool_call"]
        reason = next(e["finish_reason"] for kind, e in payload if kind == "end")
    reason = {"tool_calls": "calls", "length": "cut"}.get(reason, reason)
    return Seen(text, thought, calls, reason)


DIALECTS = {each.__name__: each for each in (chat, responses, messages, generate)}
STATES = (
    *("first", "call", "parallel", "after a result", "call after a hostile result", "quoted"),
    *("cut", "cut in its name"),
)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", STATES)
def test_answer_is_parsed_equally_in_each_dialect(world, name, dialect):
    state = states(world.shape).get(name)
    if state is None:
        pytest.skip("this family's thoughts hold no calls")
    whole, streamed = (DIALECTS[dialect](world, state, stream) for stream in (False, True))
    wanted = state.seen
    for seen in (whole, streamed):
        assert (seen.text, seen.thought, seen.reason) == (
            wanted.text,
            wanted.thought,
            wanted.reason,
        )
    if name != "cut":
        for seen in (whole, streamed):
            assert [(n, json.loads(spelled)) for n, spelled in seen.calls] == wanted.calls
        return
    ((called, shown),) = streamed.calls
    assert called == READ[0]
    assert json.dumps(READ[1]).startswith(shown.rstrip("}")) or '"lines"' in shown
    expected = json.dumps(whole_members(shown)) if dialect == "messages" else shown
    assert whole.calls == [(called, expected)]
