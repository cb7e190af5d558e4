"""An agent moves while its answer streams: the client receives every token exactly once."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.mlx.engine import Engine
from tests.support.architectures import SMALL_ARCHITECTURES
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.samples import sample
from tests.support.tiny_models import write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 12}
MESSAGES = [SYSTEM, {"role": "user", "content": "größer 東京 naïve"}]
STEP_S = 0.02
# Full attention, windows with shared layers, hybrid: each continues without a rewind.
CLASSES = ("llama", "gemma4_text", "qwen3_5")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalty": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
}


@pytest.fixture(scope="module", params=sample(CLASSES, "llama"))
def fabric(request, tmp_path_factory) -> Iterator[LocalFabric]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = str(write_model(folder / "model", SMALL_ARCHITECTURES[request.param]))
    with local_fabric(folder, model, "node-a", "node-b") as instance:
        yield instance


def stream(
    fabric: LocalFabric, agent: str, moves_at: tuple[int, ...], **options: Any
) -> tuple[list[str], list[Any], int, list[dict[str, Any]]]:
    """Stream an answer, and move the agent to and fro after the given numbers of chunks."""
    homes = itertools.cycle(["node-a", "node-b"])
    body = {
        "max_tokens": 40,
        "temperature": 0,
        **options,
        "stream_options": {"include_usage": True},
    }
    response = fabric.openai.chat.completions.with_raw_response.create(
        model=fabric.model_name, messages=MESSAGES, stream=True,
        extra_headers={"X-Agent-ID": agent}, extra_body={"ignore_eos": True}, **body,
    )  # fmt: skip
    if response.headers["x-macfabric-node"] == "node-a":
        next(homes)
    texts, logprobs, count, receipts, threads = [], [], 0, [], []

    def move(target: str) -> None:
        answer = fabric.http.post(f"/v1/agents/{agent}/migrate", json={"to": target})
        receipts.append(answer.json())

    for chunk in response.parse():
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
        for choice in chunk.choices:
            texts.append(choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs += [(e.token, e.logprob) for e in choice.logprobs.content]
        if len(texts) in moves_at and len(threads) < moves_at.index(len(texts)) + 1:
            threads.append(threading.Thread(target=move, args=(next(homes),)))
            threads[-1].start()
    for thread in threads:
        thread.join(60)
    return texts, logprobs, count, receipts


def decode_slowly(monkeypatch):
    """Delay every step, so that no answer ends before its agent moves."""
    launch = Engine.launch

    def slow(self, slots):
        time.sleep(STEP_S)
        launch(self, slots)

    monkeypatch.setattr(Engine, "launch", slow)


@pytest.mark.parametrize("way", sample(WAYS, "seeded"))
def test_moving_stream_equals_undisturbed_stream(fabric, way, monkeypatch):
    stayed = stream(fabric, f"calm-{way}", (), **WAYS[way])
    decode_slowly(monkeypatch)
    moved = stream(fabric, f"moving-{way}", (3,), **WAYS[way])

    receipts = moved[3]
    assert [receipt.get("epoch") for receipt in receipts] == [2], receipts
    assert "".join(moved[0]) == "".join(stayed[0])
    assert moved[1] == stayed[1]
    assert moved[2] == stayed[2] == 40
    view = fabric.http.get(f"/v1/agents/moving-{way}").json()
    assert (view["owner"], view["epoch"]) == (receipts[0]["to"], 2)
    again = fabric.chat([*MESSAGES, {"role": "assistant", "content": "".join(moved[0])},
                         {"role": "user", "content": "more"}], f"moving-{way}")  # fmt: skip
    assert (again.node, again.cache) == (receipts[0]["to"], "hot")
    assert again.match in ("extend", "diverge")
    assert again.cached_tokens > 100
