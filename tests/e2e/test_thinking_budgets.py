"""Thinking budgets in every dialect, on real nodes whose model never ends its thought."""

import json
import threading
import time
from dataclasses import dataclass, replace

import pytest

from fabric.settings import EffortBudgets
from fabric.turn.generation import GenerateRequest
from node.mlx.engine import Engine
from tests.support.agent_traffic import corpus
from tests.support.local_fabric import local_fabric
from tests.support.template_shapes import SHAPES, write_shape
from tests.support.thinking_model import ThoughtScript, thinking

USER = [{"role": "user", "content": "Where is the lantern?"}]
ANSWER = "the lantern is in the cellar"
WORDS = "the keeper reads what was written about the tower and counts the numbers again " * 40
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["cellar", "tower"]}},
    "required": ["place"],
    "additionalProperties": False,
}
PLACED = '{"place": "cellar"}'
FUNCTION = {"name": "look", "parameters": PLACE}
TOOLS = [{"type": "function", "function": FUNCTION}]
BUDGET = 20
MARKS = 8  # most tokens of the marks before a thought
ROOM = 200
STEP_S = 0.03
SWITCH = "<|end|><|start|>assistant<|channel|>"
CHANNELS = replace(
    SHAPES["channels"],
    specials=(*SHAPES["channels"].specials, "<|call|>", "<|constrain|>"),
    end_of_call="<|call|>",
)
ENDS = {
    "thought_opened": "</think>",
    "thinks": "</think>",
    "role_tokens": "</think>",
    "stripped_by_template": "</think>",
    "channels": SWITCH,
}


def shape_of(name):
    return CHANNELS if name == "channels" else SHAPES[name]


def script_of(name):
    """Return the script of a shape's model."""
    shape, is_harmony = shape_of(name), name == "channels"
    opening = {"thinks": "<think>\n", "channels": "<|channel|>analysis<|message|>"}.get(name, "")

    def script(request: GenerateRequest) -> ThoughtScript:
        end = shape.end
        if request.calls.must_call:
            answer = f'<tool_call>\n{{"name": "look", "arguments": {PLACED}}}\n</tool_call>'
            header = "commentary to=functions.look <|constrain|>json<|message|>"
            answer, end = (f"{header}{PLACED}", shape.end_of_call) if is_harmony else (answer, end)
        else:
            answer = PLACED if request.sampling.output is not None else ANSWER
            answer = f"final<|message|>{answer}" if is_harmony else answer
        # Without a thought, only a header precedes the answer.
        mark = ENDS[name]
        return ThoughtScript(opening + WORDS, mark, answer + end)

    return script


@pytest.fixture(scope="module", params=sorted(ENDS))
def fabric(request, tmp_path_factory):
    yield from serve(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def thought_opened(tmp_path_factory):
    yield from serve("thought_opened", tmp_path_factory)


def serve(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    shape = shape_of(name)
    model = str(write_shape(folder / "model", shape, "full", [*corpus(), WORDS, ANSWER, PLACED]))
    parsers = {"channels": "harmony", "stripped_by_template": "json"}
    settings = {"tool_parser": parsers[name]} if name in parsers else {}
    with (
        thinking(script_of(name)) as thinking_model,
        local_fabric(folder, model, "node-a", "node-b", **settings) as instance,
    ):
        instance.model = thinking_model
        yield instance


@dataclass
class ParsedAnswer:
    """Parts of an answer as a client reads them."""

    text: str
    reasoning: str
    reasoning_tokens: int | None
    tokens: int


def sse(answer):
    """Return the events of a stream."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post(fabric, path, **body):
    return fabric.http.post(path, json={"model": fabric.model_name, "temperature": 0, **body})


def chat(fabric, *, stream=False, **more):
    body = {"messages": USER, "max_tokens": ROOM, "stream": stream, **more}
    if not stream:
        answer = post(fabric, "/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        reply, usage = answer.json()["choices"][0]["message"], answer.json()["usage"]
        text, thought = reply["content"] or "", reply.get("reasoning_content") or ""
    else:
        options = {"include_usage": True}
        events = sse(post(fabric, "/v1/chat/completions", stream_options=options, **body))
        deltas = [c["delta"] for event in events for c in event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        usage = events[-1]["usage"]
    details = usage["completion_tokens_details"]
    return ParsedAnswer(text, thought, details["reasoning_tokens"], usage["completion_tokens"])


def response(fabric, *, stream=False, **more):
    body = {"input": USER[0]["content"], "max_output_tokens": ROOM, "stream": stream, **more}
    answer = post(fabric, "/v1/responses", **body)
    whole = sse(answer)[-1]["response"] if stream else answer.json()
    text = thought = ""
    for item in whole["output"]:
        parts = "".join(part["text"] for part in item.get("content") or [])
        thought += parts if item["type"] == "reasoning" else ""
        text += parts if item["type"] == "message" else ""
    usage = whole["usage"]
    details = usage["output_tokens_details"]
    return ParsedAnswer(text, thought, details["reasoning_tokens"], usage["output_tokens"])


def message(fabric, *, stream=False, budget=BUDGET, **more):
    thinks = {"type": "enabled", "budget_tokens": budget} if budget else {"type": "disabled"}
    more = {"thinking": thinks, **more}
    answer = post(fabric, "/v1/messages", messages=USER, max_tokens=ROOM, stream=stream, **more)
    assert answer.status_code == 200, answer.text
    if not stream:
        blocks = answer.json()["content"]
        text = "".join(block.get("text", "") for block in blocks)
        thought = "".join(block.get("thinking", "") for block in blocks)
        return ParsedAnswer(text, thought, None, answer.json()["usage"]["output_tokens"])
    events = sse(answer)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    thought = "".join(delta.get("thinking", "") for delta in deltas)
    (last,) = (event for event in events if event["type"] == "message_delta")
    return ParsedAnswer(text, thought, None, last["usage"]["output_tokens"])


def generate(fabric, *, stream=False, **more):
    agent = f"agent-{time.monotonic_ns()}"
    body = {"messages": USER, "max_tokens": ROOM, "temperature": 0, "stream": stream, **more}
    answer = fabric.http.post(f"/v1/agents/{agent}/generate", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        result = answer.json()
        return ParsedAnswer(result["text"], result["reasoning"], None, result["completion_tokens"])
    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    events = list(zip(names, sse(answer), strict=True))
    text = "".join(event["text"] for name, event in events if name == "text")
    thought = "".join(event["text"] for name, event in events if name == "reasoning")
    return ParsedAnswer(text, thought, None, events[-1][1]["completion_tokens"])


DIALECTS = {
    "chat": (chat, {"thinking_budget": BUDGET}),
    "responses": (response, {"reasoning": {"max_tokens": BUDGET}}),
    "messages": (message, {}),
    "generate": (generate, {"thinking_budget": BUDGET}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_thought_ends_at_budget_and_answer_follows(fabric, dialect, stream):
    ask, budget = DIALECTS[dialect]
    answer = ask(fabric, stream=stream, **budget)
    assert answer.text == ANSWER
    tokenizer = fabric.services["node-a"].node.resources.tokenizer
    thought = answer.reasoning.strip()
    assert WORDS.startswith(thought)
    assert BUDGET - 3 <= len(tokenizer.encode(thought).ids) <= BUDGET
    if answer.reasoning_tokens is not None:
        assert BUDGET <= answer.reasoning_tokens <= BUDGET + MARKS  # including the marks before it
    assert answer.reasoning_tokens is None or answer.tokens > answer.reasoning_tokens


NONE = {
    "chat": (chat, {"reasoning_effort": "none"}),
    "responses": (response, {"reasoning": {"effort": "none"}}),
    "messages": (message, {"budget": 0}),
    "generate": (generate, {"reasoning_effort": "none"}),
}
THINKING = [name for name in ENDS if name != "channels"]


@pytest.mark.parametrize("fabric", THINKING, indirect=True)
@pytest.mark.parametrize("dialect", NONE)
def test_effort_none_disables_thinking(fabric, dialect):
    ask, effort = NONE[dialect]
    answer = ask(fabric, **effort)
    assert (answer.text, answer.reasoning.strip(), answer.reasoning_tokens or 0) == (ANSWER, "", 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_strict_format_follows_forced_end_of_thought(fabric, stream):
    named = {"name": "place", "strict": True, "schema": PLACE}
    form = {"type": "json_schema", "json_schema": named}
    answer = chat(fabric, stream=stream, thinking_budget=BUDGET, response_format=form)
    assert json.loads(answer.text) == {"place": "cellar"}
    assert WORDS.startswith(answer.reasoning.strip())
    assert len(answer.reasoning) > BUDGET


def test_required_call_follows_forced_end_of_thought(fabric):
    options = {"messages": USER, "max_tokens": ROOM, "tools": TOOLS, "tool_choice": "required"}
    answer = post(fabric, "/v1/chat/completions", thinking_budget=BUDGET, **options).json()
    reply = answer["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look",
        {"place": "cellar"},
    )
    assert WORDS.startswith(reply["reasoning_content"].strip())
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= BUDGET + MARKS


def test_max_tokens_bounds_thought_and_answer_together(thought_opened):
    answer = chat(thought_opened, thinking_budget=BUDGET, max_tokens=BUDGET // 2)
    assert (answer.text, answer.tokens) == ("", BUDGET // 2)
    answer = chat(thought_opened, thinking_budget=BUDGET, max_tokens=BUDGET + 4)
    assert answer.tokens == BUDGET + 4
    assert ANSWER.startswith(answer.text)


def test_node_settings_set_default_and_effort_budgets(tmp_path):
    model = str(write_shape(tmp_path / "model", SHAPES["thought_opened"], "full", [WORDS]))
    settings = {"thinking_budget": 9, "effort_budgets": EffortBudgets(low=5)}
    with (
        thinking(script_of("thought_opened")),
        local_fabric(tmp_path, model, "node-a", **settings) as instance,
    ):
        counts = [
            chat(instance, **options).reasoning_tokens
            for options in (
                {},
                {"reasoning_effort": "low"},
                {"thinking_budget": 12, "reasoning_effort": "low"},
                {"thinking_budget": -1, "max_tokens": 40},
                {"reasoning_effort": "max", "max_tokens": 40},
            )
        ]
    assert counts == [9, 5, 12, 40, 40]


def test_restarted_node_continues_after_forced_end_of_thought(thought_opened):
    """The record and the cache hold the thought, its forced end and the answer."""
    generated = "/v1/agents/lasting/generate"
    options = {"max_tokens": ROOM, "temperature": 0}
    first = thought_opened.http.post(
        generated, json={**options, "messages": USER, "thinking_budget": BUDGET}
    )
    assert first.json()["text"] == ANSWER
    held = first.json()["prompt_tokens"] + first.json()["completion_tokens"]
    thought_opened.restart(first.json()["node"])
    again = thought_opened.http.post(
        generated, json={**options, "text": "\nand so", "max_tokens": 4}
    ).json()
    assert again["cached_tokens"] >= held - 1
    assert again["prompt_tokens"] > held


@pytest.mark.parametrize("moves_at", [5, BUDGET - 2, BUDGET - 1, BUDGET, BUDGET + 2])
def test_answer_can_migrate_during_thought_or_its_forced_end(thought_opened, monkeypatch, moves_at):
    calm = chat(thought_opened, stream=True, thinking_budget=BUDGET)
    launch = Engine.launch

    def slowly(self, step):
        time.sleep(STEP_S)
        launch(self, step)

    monkeypatch.setattr(Engine, "launch", slowly)
    agent, receipts, threads = f"moving-{moves_at}", [], []
    body = {
        "model": thought_opened.model_name,
        "messages": USER,
        "max_tokens": ROOM,
        "temperature": 0,
    }
    body |= {"thinking_budget": BUDGET, "stream": True, "stream_options": {"include_usage": True}}
    text, thought, usage, count = "", "", None, 0
    with thought_opened.http.stream(
        "POST", "/v1/chat/completions", json=body, headers={"X-Agent-ID": agent}
    ) as answer:
        home = answer.headers["x-macfabric-node"]
        other = {"node-a": "node-b", "node-b": "node-a"}[home]

        def move():
            migrated = thought_opened.http.post(f"/v1/agents/{agent}/migrate", json={"to": other})
            receipts.append(migrated.json())

        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                thought += choice["delta"].get("reasoning_content") or ""
                count += 1
            if count == moves_at and not threads:
                threads.append(threading.Thread(target=move))
                threads[0].start()
    threads[0].join(60)
    assert receipts[0]["epoch"] == 2, receipts
    resumed = thought_opened.model.sequences[-1].input.resumed  # on the other node
    assert moves_at - 1 <= len(resumed.answer_ids) <= moves_at + MARKS
    assert (text, thought) == (calm.text, calm.reasoning)
    assert usage["completion_tokens"] == calm.tokens
    assert usage["completion_tokens_details"]["reasoning_tokens"] == calm.reasoning_tokens
