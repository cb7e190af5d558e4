"""An idle agent leaves its owner's queue for an idle twin node, with its cache, only once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.mlx.engine import Engine
from tests.support.architectures import SMALL_ARCHITECTURES
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_until

QUEUE_S = 2.0  # reached by few enough prompts on a fast machine, too
PROMPT_WORDS = 8_000
PROMPTS_MAX = 40
PAUSE_S = 1.0
SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 60}
MORE = "and the dog sat on the mat too, where the cat had sat before. " * 60


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[LocalFabric]:
    folder: Path = tmp_path_factory.mktemp("queues")
    model = str(write_model(folder / "model", SMALL_ARCHITECTURES["llama"]))
    with local_fabric(folder, model, "node-a", "node-b") as instance:
        yield instance


@contextmanager
def queue(fabric: LocalFabric, monkeypatch, node: str) -> Iterator[None]:
    """Queue QUEUE_S seconds of prompts on a node, with a pause before each chunk."""
    other = "node-b" if node == "node-a" else "node-a"
    gate, slow = threading.Event(), fabric.services[node].node.resources.engine.engine
    prefill = Engine.prefill

    def paused(engine, *work):
        if engine is slow:
            gate.wait(PAUSE_S)
        return prefill(engine, *work)

    monkeypatch.setattr(Engine, "prefill", paused)
    assert fabric.http.post(f"/v1/nodes/{other}/drain").status_code in (200, 202)
    before = fabric.services[node].node.view().waiting
    pool = ThreadPoolExecutor(PROMPTS_MAX)
    pending = []
    try:
        while fabric.services[node].node.view().queue_s < QUEUE_S:
            text = f"{len(pending)} " + "cat dog mat log " * (PROMPT_WORDS // 4)
            words = [{"role": "user", "content": text}]
            pending.append(pool.submit(fabric.chat, words, f"queued-{len(pending)}", max_tokens=1))
            assert len(pending) <= PROMPTS_MAX
            wait_until(
                lambda: fabric.services[node].node.view().waiting >= before + len(pending) - 1
            )
        assert fabric.http.post(f"/v1/nodes/{other}/undrain").status_code == 200
        fabric.await_agents()
        yield
    finally:
        gate.set()
        for each in pending:
            each.result()
        pool.shutdown()


def test_next_turn_moves_to_the_idle_twin_and_five_in_a_row_stay(fabric, monkeypatch):
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    first = fabric.chat(messages, "alice", max_tokens=4)
    with queue(fabric, monkeypatch, first.node):
        answers = []
        for number in range(5):
            messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": MORE}]
            answers.append(fabric.chat([*messages], "alice", max_tokens=4))
            assert number or answers[0].cached_tokens > 0
    rows = fabric.http.get("/v1/placement/decisions").json()["data"]
    of_alice = [row for row in rows if row["agent"] == rows_agent(rows, answers[0].node)]

    assert {answer.node for answer in answers} == {answers[0].node} != {first.node}
    assert {answer.epoch for answer in answers} == {first.epoch + 1}, "the agent must move once"
    assert [row["how"] for row in of_alice][::-1] == ["recompute", "move", *["stay"] * 4]


def rows_agent(rows, node) -> str:
    """Return the log name of the agent that moved to a node."""
    return next(row["agent"] for row in rows if row["how"] == "move" and row["node"] == node)
