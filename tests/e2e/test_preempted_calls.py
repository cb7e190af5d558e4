"""Forced calls that outgrow a node's memory: preemption does not change them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import jsonschema
import pytest

from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import HandedOver
from node.mlx.loaded_model import load_model
from node.turn.turn import Turn
from tests.support.local_fabric import LocalFabric, local_fabric

# Two calls start with four of eight blocks each, and each outgrows them.
BLOCKS = 8
PLACES = {
    "type": "object",
    "properties": {
        "places": {
            "type": "array",
            "minItems": 20,
            "maxItems": 20,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 2, "maxLength": 9},
                    "size": {"type": "integer", "minimum": 1, "maximum": 9999},
                },
                "required": ["name", "size"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["places"],
}
TOOLS = [{"type": "function", "function": {"name": "list", "parameters": PLACES}}]
NAMES = ("ann", "bob")
WAIT_S = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[LocalFabric]:
    budget_bytes = load_model("recall").spec.resident_bytes(BLOCKS * BLOCK_TOKENS)
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "node-a", hot_bytes=budget_bytes) as instance:
        yield instance


def call(fabric: LocalFabric, name: str, agent: str, has_begun: Event) -> tuple[str, int]:
    """Stream a call to its end; return its arguments and the answer's tokens."""
    arguments, reason, tokens = "", None, 0
    for chunk in fabric.openai.chat.completions.create(
        model="recall",
        messages=[{"role": "user", "content": f"List the places of {name}."}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=6 * BLOCK_TOKENS,
        temperature=1.0,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Agent-ID": agent},
    ):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            assert not choice.delta.content, choice.finish_reason
            for part in choice.delta.tool_calls or []:
                arguments += part.function.arguments or ""
                has_begun.set()
            reason = choice.finish_reason or reason
    assert reason == "tool_calls"
    return arguments, tokens


def test_preempted_call_is_unchanged(fabric, monkeypatch):
    alone = {name: call(fabric, name, f"{name}-alone", Event()) for name in NAMES}
    preempted = []
    serve = Turn._claim_and_serve

    async def watched(self):
        last = await serve(self)
        if isinstance(last, HandedOver):
            preempted.append(last.resume)
        return last

    monkeypatch.setattr(Turn, "_claim_and_serve", watched)
    begun = {name: Event() for name in NAMES}
    with ThreadPoolExecutor(len(NAMES)) as threads:
        pending = {}
        for name in NAMES:
            pending[name] = threads.submit(call, fabric, name, name, begun[name])
            assert begun[name].wait(WAIT_S)
        together = {name: answer.result(WAIT_S) for name, answer in pending.items()}

    assert together == alone
    assert any(resume and resume.answer_ids for resume in preempted), "no begun call was preempted"
    for arguments, tokens in alone.values():
        jsonschema.validate(json.loads(arguments), PLACES)
        assert tokens > 3 * BLOCK_TOKENS
