"""Stops and flushes during traffic, and clients that do not read their streams."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest

from fabric.control.calls import encode_call
from fabric.control.node_calls import Done, Flush, ReleaseAgent, Stop
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import MigrationId, NodeName, OperationId
from fabric.turn.generation import Admitted, Delta, Failed, Finished, GenerateRequest, Sampling
from node import control_calls
from node.prompt.prompt_encoder import PromptEncoder
from node.turn import turn
from tests.support.services import TENANT, ask, call, identity_of, running
from tests.support.tiny_models import ONE_LAYER, write_model

WORDS = "the cat sat on the mat and the dog sat on the log. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER))


class Talk:
    """An agent whose client sends a turn after every answer, until one is refused."""

    def __init__(self, service, name):
        self.answers, self.refusal = 0, None
        self._service, self._name = service, name
        self._is_over = False
        self.is_on = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self):
        while not self._is_over:
            try:
                reply = ask(self._service, WORDS, agent=self._name, max_tokens=40, ignore_eos=True)
            except FabricError as error:
                self.refusal = error
                break
            last = reply.events[-1]
            if not isinstance(last, Finished):
                self.refusal = last
                break
            self.answers += 1
            self.is_on.set()

    def await_refusal(self):
        self._thread.join(60)
        assert self.refusal is not None

    def end(self):
        self._is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def talks(model, tmp_path):
    with running(tmp_path, model) as service:
        talks = [Talk(service, f"agent-{n}") for n in range(3)]
        for talk in talks:
            assert talk.is_on.wait(60)
        yield service, talks
        for talk in talks:
            talk.end()


def test_stop_during_traffic_completes_and_refuses_turns_as_stopping(talks):
    service, agents = talks
    assert "durable" in call(service, Stop(), Done).detail
    for talk in agents:
        talk.await_refusal()
        assert (talk.refusal.status, talk.refusal.code) == (503, "stopping")
    assert not service.node.live_turns


def test_turn_planning_its_prompt_during_stop_is_refused_as_stopping(model, tmp_path, monkeypatch):
    plan, is_planning = PromptEncoder.plan, threading.Event()

    def plan_once_unwanted(self, encoding, agent, text, limit):
        is_planning.set()
        while not limit.is_unwanted():
            time.sleep(0.01)
        return plan(self, encoding, agent, text, limit)

    monkeypatch.setattr(control_calls, "NODE_STOP_WAIT_S", 0.2)
    with running(tmp_path, model) as service:
        monkeypatch.setattr(PromptEncoder, "plan", plan_once_unwanted)

        async def scenario():
            events = service.node.turns.serve(request("agent", 8))
            first = asyncio.ensure_future(anext(events))
            assert await asyncio.to_thread(is_planning.wait, 60)
            stopping = asyncio.wrap_future(service.control(encode_call(Stop())))
            with pytest.raises(RetryLaterError) as caught:
                await first
            await stopping
            return caught.value.code

        assert on_loop(service, scenario()) == "stopping"


def test_flush_during_traffic_completes_and_ends_no_turn(talks):
    service, agents = talks
    for _ in range(3):
        assert call(service, Flush(), Done).detail
    counts = [talk.answers for talk in agents]
    for talk in agents:
        talk.end()
        assert talk.refusal is None
    assert all(talk.answers >= count for talk, count in zip(agents, counts, strict=True))


def test_flush_does_not_wait_for_later_turns(model, tmp_path):
    with running(tmp_path, model) as service:

        async def scenario():
            node = service.node
            before = node.turns.serve(request("before", 40))
            await anext(before)
            flushing = asyncio.ensure_future(node.live_turns.quiesce(60.0))
            await asyncio.sleep(0)  # it collects the running turns
            behind = node.turns.serve(request("behind", 2_000))
            await anext(behind)
            assert [event async for event in before][-1].event == "finished"
            assert await flushing == 0
            assert len(node.live_turns) == 1
            await behind.aclose()

        on_loop(service, scenario())


@pytest.mark.nightly
def test_flush_wait_for_a_long_turn_is_bounded_and_reported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(control_calls, "FLUSH_WAIT_S", 0.05)
    with running(tmp_path, model) as service:

        async def scenario():
            events = service.node.turns.serve(request("long", 2_000))
            assert isinstance(await anext(events), Admitted)
            (running_turn,) = service.node.live_turns
            reply = await asyncio.wrap_future(service.control(encode_call(Flush())))
            assert b"1 turns still run" in reply
            assert not running_turn.task.done()
            seen = [event async for event in events]
            assert isinstance(seen[-1], Finished)

        on_loop(service, scenario())


def request(agent, tokens):
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        OperationId("test-ending"), TENANT, identity_of(agent), sampling, prompt=WORDS
    )


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(240)


async def is_released(alive):
    """Check that `alive` refers to nothing; threads drop it at the end of their step."""
    for _ in range(100):
        if alive() is None:
            return True
        await asyncio.sleep(0.1)
    return False


def test_unread_stream_of_finished_turn_holds_no_cache(model, tmp_path):
    """The turn's cache belongs to the agent by then, and may be evicted."""
    with running(tmp_path, model) as service:

        async def scenario():
            node = service.node
            events = node.turns.serve(request("slow", 8))
            await anext(events)
            (its_turn,) = node.live_turns
            await asyncio.wait_for(asyncio.wait([its_turn.task]), 60)
            agent = node.resources.table.get((TENANT, "slow"))
            cache = weakref.ref(agent.cache)
            node.tiers.hot.make_room(agent.hot_bytes)
            assert agent.cache is None
            is_gone = await is_released(cache)
            assert isinstance([event async for event in events][-1], Finished)
            return is_gone

        assert on_loop(service, scenario())


def test_failed_turn_is_freed_once_its_error_is_read(model, tmp_path):
    """No garbage collection is needed, although the error's traceback refers to the turn."""
    with running(tmp_path, model) as service:

        async def scenario():
            events = service.node.turns.serve(replace(request("refused", 8), prompt=""))
            first = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            (its_turn,) = service.node.live_turns
            alive = weakref.ref(its_turn)
            del its_turn
            with suppress(FabricError):
                await first
            del first, events
            return await is_released(alive)

        gc.disable()
        try:
            assert on_loop(service, scenario())
        finally:
            gc.enable()


@pytest.mark.parametrize("hangs_up", [True, False])
def test_failed_turn_holds_no_cache_while_its_stream_is_unread(model, tmp_path, hangs_up):
    with running(tmp_path, model) as service:

        async def scenario():
            node, lost_turn = service.node, request("taken", 20_000)
            events = node.turns.serve(lost_turn)
            while not isinstance(await anext(events), Delta):
                pass
            (its_turn,) = node.live_turns
            task, cache = its_turn.task, weakref.ref(its_turn._sequence.cache)
            del its_turn
            if hangs_up:
                await events.aclose()
            release = ReleaseAgent(
                TENANT, lost_turn.identity.agent, 2, MigrationId("took-it"), NodeName("node-b")
            )
            await node.moves.source.release(release)
            await asyncio.wait_for(asyncio.wait([task]), 60)
            is_gone = await is_released(cache)
            assert hangs_up or isinstance([event async for event in events][-1], Failed)
            return is_gone, node.live_turns.fenced_count

        gc.disable()
        try:
            assert on_loop(service, scenario()) == (True, 1)
        finally:
            gc.enable()


def test_slow_reader_sees_no_gap_and_no_success(model, tmp_path, monkeypatch):
    monkeypatch.setattr(turn, "STREAM_EVENTS_MAX", 8)
    with running(tmp_path, model) as service:
        whole = ask(service, WORDS, agent="calm", max_tokens=8, ignore_eos=True)
        assert isinstance(whole.events[-1], Failed | Finished)

        async def scenario(tokens):
            events = service.node.turns.serve(request("slow", tokens))
            seen = [await anext(events)]
            (its_turn,) = service.node.live_turns
            await asyncio.wait_for(asyncio.wait([its_turn.task]), 60)
            return seen + [event async for event in events]

        for tokens in range(8, 20):  # the answer ends before, at and after the dropped event
            seen = on_loop(service, scenario(tokens))
            numbers = [event.index for event in seen if isinstance(event, Delta)]
            assert numbers == sorted(set(numbers))
            if isinstance(seen[-1], Finished):
                assert len(seen) <= 8 + 2
            else:
                assert isinstance(seen[-1], Failed)
                assert seen[-1].code == "slow_reader"
        assert isinstance(seen[-1], Failed)
        monkeypatch.undo()
        assert ask(service, WORDS, agent="slow", max_tokens=4, ignore_eos=True).finished.durable


@pytest.mark.parametrize(("wait_s", "ends_whole"), [(60.0, True), (0.2, False)])
def test_stop_waits_a_bounded_time_for_running_turns(
    model, tmp_path, monkeypatch, wait_s, ends_whole
):
    monkeypatch.setattr(control_calls, "NODE_STOP_WAIT_S", wait_s)
    with running(tmp_path, model) as service:

        async def scenario():
            events = service.node.turns.serve(request("long", 60 if ends_whole else 4_000))
            assert isinstance(await anext(events), Admitted)
            stopping = asyncio.wrap_future(service.control(encode_call(Stop())))
            rest = [event async for event in events]
            await stopping
            with pytest.raises(FabricError, match="stopping"):
                await anext(service.node.turns.serve(request("late", 8)))
            return rest[-1]

        last = on_loop(service, scenario())
    assert isinstance(last, Finished if ends_whole else Failed), last
    assert ends_whole or last.code == "stopping"
