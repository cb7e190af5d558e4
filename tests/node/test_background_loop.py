"""Periodic work: a failure is logged, counted and retried."""

import asyncio

import pytest

from node import background_loop
from node.background_loop import BackgroundLoop
from node.tiers.record_writer import RecordWriter
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model


class Steps:
    """Steps that return the given waits, and raise the given exceptions."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.begun = 0
        self.failures = 0
        self.all_done = asyncio.Event()
        self.first = asyncio.Event()
        self.hurry = asyncio.Event()

    async def step(self):
        self.begun += 1
        self.first.set()
        outcome = self.outcomes.pop(0) if self.outcomes else 60.0
        if not self.outcomes:
            self.all_done.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def note_failure(self):
        self.failures += 1


def run(*outcomes, during=None):
    """Run a loop until all outcomes are used; return its steps."""

    async def run_loop():
        steps = Steps(*outcomes)
        loop = BackgroundLoop("failing step", steps.step, steps.note_failure, hurry=steps.hurry)
        loop.start()
        if during is not None:
            await during(loop, steps)
        await asyncio.wait_for(steps.all_done.wait(), 60)
        await loop.stop()
        return steps

    return asyncio.run(run_loop())


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("x"), TypeError("x"), OSError(5)])
def test_failed_step_is_logged_counted_and_retried(error, monkeypatch, caplog):
    monkeypatch.setattr(background_loop, "LOOP_RETRY_S", 0.0)
    steps = run(0.0, error, error, 0.0, 60.0)

    assert steps.begun == 5
    assert steps.failures == 2
    assert [r.message for r in caplog.records] == ["failing step failed and will be retried"] * 2


def test_hurry_and_stop_cut_the_wait_after_a_failed_step():
    async def during(loop, steps):
        await steps.first.wait()
        await asyncio.sleep(0.05)
        assert steps.begun == 1  # the loop waits to retry
        steps.hurry.set()

    assert run(RuntimeError("x"), 60.0, during=during).begun == 2


def test_stop_waits_for_running_step():
    async def go():
        begun, may_end, ended = asyncio.Event(), asyncio.Event(), []

        async def step():
            begun.set()
            await may_end.wait()
            ended.append(1)
            return 0.0

        loop = BackgroundLoop("one long step", step, lambda: None)
        loop.start()
        await begun.wait()
        stopping = asyncio.create_task(loop.stop())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        may_end.set()
        await asyncio.wait_for(stopping, 60)
        assert ended == [1]

    asyncio.run(go())


def test_node_loops_continue_after_unexpected_failures(tmp_path, monkeypatch):
    """Each of a node's loops survives any exception, and the node's view counts it."""
    monkeypatch.setattr(background_loop, "LOOP_RETRY_S", 0.01)
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.01)
    monkeypatch.setattr("node.upkeep.RECLAIM_EVERY_S", 0.01)
    monkeypatch.setattr("node.store.scrubber.SCRUB_STEP_S", 0.01)
    model = str(write_model(tmp_path / "llama", ONE_LAYER))
    with running(tmp_path, model) as service:
        node = service.node
        seen = {"flusher": 0, "reclaim": 0, "scrubber": 0}
        enough = asyncio.Event()

        def fail(name):
            seen[name] += 1
            if all(count >= 3 for count in seen.values()):
                service._loop.call_soon_threadsafe(enough.set)
            raise RuntimeError(name)

        monkeypatch.setattr(type(node.tiers.unsaved), "agents", lambda _: fail("flusher"))
        monkeypatch.setattr(type(node.background.upkeep), "round", lambda _: fail("reclaim"))
        monkeypatch.setattr(type(node.background.scrubber), "_is_idle", lambda _: fail("scrubber"))
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(enough.wait(), 60), service._loop).result(
            90
        )
        assert node.view().failed_rounds >= 9
        monkeypatch.undo()
        assert ask(service, "the cat sat", agent="a", max_tokens=2).finished.durable


def test_failed_save_ahead_does_not_affect_the_turn(tmp_path, monkeypatch):
    model = str(write_model(tmp_path / "llama", ONE_LAYER))
    with running(tmp_path, model) as service:
        monkeypatch.setattr(
            RecordWriter, "find_all_stored", _fails_once(RecordWriter.find_all_stored)
        )
        before = service.node.health.failed_rounds
        reply = ask(service, "the cat sat on the mat " * 80, agent="a", max_tokens=4)
        assert reply.finished.durable
        assert service.node.health.failed_rounds == before + 1


def _fails_once(method):
    failed = []

    def wrapped(self, spans):
        if not failed:
            failed.append(1)
            raise RuntimeError
        return method(self, spans)

    return wrapped
