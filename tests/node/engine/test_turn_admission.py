"""Refusals, hang-ups and bursts between claim and engine, and their effect on the agent."""

import asyncio
import threading
import time
import weakref

import pytest

from fabric.control.node_calls import Done, Flush
from fabric.errors import FabricError, OverloadedError
from fabric.ids import OperationId
from fabric.turn.generation import CacheTier, GenerateRequest, Sampling
from node.engine.memory_budget import Reservation
from node.limits import BLOCKED_POLL_S
from node.tiers import restore
from node.tiers.restore import load_layout
from tests.support.on_loop import change
from tests.support.services import TENANT, ask, call, identity_of, running
from tests.support.tiny_models import ONE_LAYER, write_model
from tests.support.waiting import wait_until

WORDS = "the cat sat on the mat and the dog sat on the log. "
BRIEF = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER))


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    with running(tmp_path_factory.mktemp("node"), model) as node_service:
        yield node_service


def agent_of(service, name):
    return service.node.resources.table.get((TENANT, name))


def text_of_tokens(service, begins, count):
    """Return a raw prompt of `count` tokens that begins with `begins`."""
    text = begins
    while len(service.node.resources.tokenizer.encode(text).ids) < count:
        text += "x"
    assert len(service.node.resources.tokenizer.encode(text).ids) == count
    return text


def expect_refusal(service, *arguments, **options):
    with pytest.raises(OverloadedError):
        ask(service, *arguments, **options)


def test_refused_turn_leaves_the_agent_its_own_cache(service, monkeypatch):
    """The cache of another conversation, even of the same length, does not replace it."""
    foreign = text_of_tokens(service, "another conversation. " + WORDS * 8, 600)
    ask(service, foreign, agent="bob", **BRIEF)
    own = text_of_tokens(service, "her own. " + WORDS * 8, 508)
    undisturbed = ask(service, own, agent="calm", **BRIEF)
    first = ask(service, own, agent="alice", **BRIEF)
    alice = agent_of(service, "alice")
    assert alice.manifest.tokens_count == 512
    cache = alice.cache

    with monkeypatch.context() as patch:
        patch.setattr(service.node.resources.engine, "submit", _refuse)
        expect_refusal(service, foreign, agent="alice", **BRIEF)
    assert alice.cache is cache
    assert cache.tokens_count == 512

    longer = own + first.text + " and then"
    again = ask(service, longer, agent="alice", **BRIEF)
    assert again.admitted.cache is CacheTier.HOT
    assert again.admitted.cached_tokens >= 508
    assert (
        again.text == ask(service, own + undisturbed.text + " and then", agent="calm", **BRIEF).text
    )
    # Blocks saved under the names of the agent's tokens hold those tokens.
    call(service, Flush(drop_hot=True), Done)
    assert ask(service, longer, agent="third", **BRIEF).text == again.text


def test_unsaved_cache_survives_a_refused_turn(service, monkeypatch):
    """The memory survives even if the prompt shares only a part of it."""
    own = WORDS * 6
    first = ask(service, own, agent="unsaved", **BRIEF)
    agent = agent_of(service, "unsaved")
    change(service, agent, is_durable=False, saved=None)  # as if the disk had refused it
    cache, count = agent.cache, agent.manifest.tokens_count

    with monkeypatch.context() as patch:
        patch.setattr(service.node.resources.engine, "submit", _refuse)
        for prompt in (own[:200] + "otherwise", own, "nothing in common"):
            expect_refusal(service, prompt, agent="unsaved", **BRIEF)
    assert agent.cache is cache
    assert cache.tokens_count == count
    again = ask(service, own + first.text + " then", agent="unsaved", **BRIEF)
    assert again.admitted.cache is CacheTier.HOT
    # The answer's text may encode to other tokens than those sampled.
    assert again.admitted.cached_tokens >= count - BRIEF["max_tokens"]


def _refuse(*_):
    message = "the queue is full"
    raise OverloadedError(message)


def test_already_admitted_turn_is_never_refused_by_a_full_queue(service, monkeypatch):
    """The client was already promised an answer, and is still waiting for it."""
    monkeypatch.setattr(service.node.resources.engine, "_waiting_max", 0)
    expect_refusal(service, WORDS, agent="newcomer", **BRIEF)

    assert ask(service, WORDS, agent="given back", was_admitted=True, **BRIEF).text


def test_hang_up_of_a_waiting_client_keeps_record_and_cache(service):
    """A turn that has not started leaves record and cache unchanged for any prompt."""
    own = WORDS * 6
    ask(service, own, agent="waits", **BRIEF)
    agent = agent_of(service, "waits")
    record, cache = agent.manifest, agent.cache

    async def scenario():
        node = service.node
        hold = threading.Event()
        blocking = node.resources.engine.call(lambda: hold.wait(60))
        events = node.turns.serve(request("waits", own[:200] + "otherwise"))
        assert (await anext(events)).cached_tokens < record.tokens_count
        turn = agent.turn
        await events.aclose()
        hold.set()
        assert await asyncio.wrap_future(blocking)
        await asyncio.wait_for(turn.task, 60)

    on_loop(service, scenario())
    assert agent.manifest is record
    assert agent.cache is cache
    assert cache.tokens_count == record.tokens_count
    assert service.node.resources.engine.budget.reserved_bytes == 0


def request(agent, prompt, **sampling):
    return GenerateRequest(
        OperationId("test-admission"), TENANT, identity_of(agent),
        Sampling(**{**BRIEF, **sampling}), prompt=prompt,
    )  # fmt: skip


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(240)


class Caches:
    """The memory of all resident caches, measured whenever one is created or grows."""

    def __init__(self, service, monkeypatch):
        self.peak_bytes = self.made = 0
        self._alive = weakref.WeakSet()
        engine = service.node.resources.engine.engine
        scheduler = service.node.resources.engine._scheduler
        new_cache, iterate = engine.new_cache, scheduler.iterate

        def new_measured_cache(tokens):
            cache = new_cache(tokens)
            self._alive.add(cache)
            self.made += 1
            self.measure()
            return cache

        def iterate_and_measure():
            did = iterate()
            self.measure()
            return did

        monkeypatch.setattr(engine, "new_cache", new_measured_cache)
        monkeypatch.setattr(scheduler, "iterate", iterate_and_measure)

    def measure(self):
        held_bytes = sum(cache.size_bytes for cache in list(self._alive))
        self.peak_bytes = max(self.peak_bytes, held_bytes)


def test_many_agents_returning_at_once_stay_within_memory(model, tmp_path, monkeypatch):
    """Caches are restored as memory is granted, not all at once."""
    prompts = {f"agent-{n}": f"{n} talks. {WORDS * 30}" for n in range(16)}
    with running(tmp_path, model) as service:
        one_bytes = 0
        answers = {}
        for name, prompt in prompts.items():
            answers[name] = ask(service, prompt, agent=name, **BRIEF).text
            one_bytes = agent_of(service, name).hot_bytes
    hot_bytes = int(3.5 * one_bytes)
    with running(tmp_path, model, hot_bytes=hot_bytes) as service:
        caches = Caches(service, monkeypatch)

        async def turn(name):
            prompt = prompts[name] + answers[name] + " go on"
            return [e async for e in service.node.turns.serve(request(name, prompt))]

        async def run_all_turns():
            return await asyncio.gather(*(turn(name) for name in prompts))

        replies = on_loop(service, run_all_turns())
        assert all(events[0].cache is CacheTier.DISK for events in replies)
        assert all(events[-1].event == "finished" for events in replies)
        assert caches.made >= len(prompts)
        assert one_bytes < caches.peak_bytes <= hot_bytes + one_bytes
        assert service.node.resources.engine.budget.reserved_bytes == 0


def test_failed_restore_ends_only_its_turn_and_releases_memory(model, tmp_path, monkeypatch):
    with running(tmp_path, model) as service:
        reply = ask(service, WORDS * 30, agent="a", **BRIEF)
        call(service, Flush(drop_hot=True), Done)

        def broken(*_arguments, **_options):
            raise OSError(5, "cannot")

        with monkeypatch.context() as patch:
            patch.setattr(restore, "load_layout", broken)
            with pytest.raises(FabricError) as caught:
                ask(service, WORDS * 30, agent="a", **BRIEF)
        assert caught.value.status == 500
        # The engine thread answers before it removes the sequence.
        wait_until(lambda: not list(service.node.resources.engine._queue))
        assert service.node.resources.engine.budget.reserved_bytes == 0
        again = ask(service, WORDS * 30, agent="a", **BRIEF)
        assert again.text == reply.text
        assert again.admitted.cache is CacheTier.DISK


def test_hang_up_during_restore_keeps_the_record(model, tmp_path, monkeypatch):
    """A partly restored cache must not replace the agent's record."""
    with running(tmp_path, model) as service:
        ask(service, WORDS * 60, agent="a", **BRIEF)
        call(service, Flush(drop_hot=True), Done)
        agent = agent_of(service, "a")
        record, loads = agent.manifest, []

        def slow(*arguments, cancel=None, **options):
            service._loop.call_soon_threadsafe(agent.turn.cancel)
            assert cancel.wait(60)
            layout = load_layout(*arguments, cancel=cancel, **options)
            loads.append(layout.tokens_count)
            return layout

        async def scenario():
            return [e async for e in service.node.turns.serve(request("a", WORDS * 60))]

        with monkeypatch.context() as patch:
            patch.setattr(restore, "load_layout", slow)
            on_loop(service, scenario())
        assert loads == [0]
        assert agent.manifest is record
        again = ask(service, WORDS * 60, agent="a", **BRIEF)
        assert again.admitted.cached_tokens == again.admitted.prompt_tokens - 1


def test_hang_up_after_loading_a_shared_prefix_keeps_the_own_cache(service, monkeypatch):
    """The loaded prefix may be exactly as long as the agent's own cache."""
    foreign = text_of_tokens(service, "one more. " + WORDS * 8, 513)
    ask(service, foreign, agent="bert", **BRIEF)
    own = text_of_tokens(service, "his own. " + WORDS * 8, 508)
    undisturbed = ask(service, own, agent="calmer", **BRIEF)
    first = ask(service, own, agent="carl", **BRIEF)
    carl, loads = agent_of(service, "carl"), []
    assert carl.manifest.tokens_count == 512

    def read(*arguments, cancel=None, **options):
        layout = load_layout(*arguments, cancel=cancel, **options)
        loads.append(layout.tokens_count)
        carl.turn._sequence.cancelled.set()  # the engine reads it before the turn continues
        return layout

    async def scenario():
        return [e async for e in service.node.turns.serve(request("carl", foreign))]

    with monkeypatch.context() as patch:
        patch.setattr(restore, "load_layout", read)
        on_loop(service, scenario())
    assert loads == [512]
    again = ask(service, own + first.text + " and then", agent="carl", **BRIEF)
    assert again.admitted.cached_tokens >= 508
    assert (
        again.text
        == ask(service, own + undisturbed.text + " and then", agent="calmer", **BRIEF).text
    )


def test_hang_up_of_a_queued_turn_leaves_the_agent_queue(service):
    async def scenario():
        node = service.node
        ask_first = node.turns.serve(request("line", WORDS, max_tokens=400))
        await anext(ask_first)
        agent = agent_of(service, "line")
        waiting = [node.turns.serve(request("line", WORDS)) for _ in range(3)]
        firsts = [asyncio.create_task(anext(each)) for each in waiting]
        async with asyncio.timeout(60):
            while agent.waiting_count < 3:  # noqa: ASYNC110 - the node's own state
                await asyncio.sleep(0.001)
        for first in firsts:
            first.cancel()
        async with asyncio.timeout(60):
            while agent.waiting_count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert agent.turn is not None
        await ask_first.aclose()

    on_loop(service, scenario())


def test_memory_that_cannot_be_freed_is_requested_only_per_poll(service, monkeypatch):
    """Otherwise engine and event loop would wake each other while a turn waits."""
    node, iterations = service.node, []
    call(service, Flush(drop_hot=True), Done)
    ask(service, WORDS * 6, agent="kept", **BRIEF)
    agent, budget = agent_of(service, "kept"), node.resources.engine.budget
    others = Reservation(budget)
    others.count(budget.claimable_bytes - budget.idle_bytes)
    take_in = node.resources.engine._scheduler.iterate

    def iterate():
        iterations.append(1)
        return take_in()

    monkeypatch.setattr(node.resources.engine._scheduler, "iterate", iterate)

    async def scenario():
        agent.is_durable = False
        monkeypatch.setattr(node.tiers.unsaved, "hurry", lambda: None)
        waiting = asyncio.ensure_future(anext(node.turns.serve(request("waits too", WORDS * 6))))
        begun_s = time.monotonic()
        await asyncio.sleep(1.0)
        spent_s, count = time.monotonic() - begun_s, len(iterations)
        agent.is_durable = True
        others.release()
        node.resources.engine.wake()
        await asyncio.wait_for(waiting, 60)
        return count, spent_s

    count, spent_s = on_loop(service, scenario())
    assert 1 < count <= 2 * spent_s / BLOCKED_POLL_S + 10
