"""Answers that outgrow what was reserved for them stay within the memory budget, wait, or end."""

import asyncio
import threading

import pytest

from fabric.ids import OperationId
from fabric.limits import BLOCK_TOKENS, MIB
from fabric.turn.generation import (
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    Priority,
    Sampling,
)
from node.engine.sequence import Broke, Ended
from tests.node.fake_engine import (
    TOKEN_BYTES,
    SchedulerRig,
    expected,
    is_undisturbed,
    last_of,
    make_sequence,
)
from tests.support.services import TENANT, ask, identity_of, running
from tests.support.tiny_models import LLAMA, write_model

ROOM_TOKENS = BLOCK_TOKENS
ROOM_BYTES = ROOM_TOKENS * TOKEN_BYTES


def grown_bytes(tokens_count):
    return -(-tokens_count // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES


def options_of(room_tokens=ROOM_TOKENS):
    """Reserve so much; the answer may grow to any number of blocks."""
    return {
        "reserve_bytes": grown_bytes(room_tokens),
        "room_tokens": room_tokens,
        "grown_bytes": grown_bytes,
        "is_preemptible": lambda: True,
    }


def add(rig, answer_tokens, **options):
    return rig.add(4, answer_tokens, **options_of(), **options)


def resume(rig, sequence, ended):
    """Ask again for what was handed over, as the router does."""
    left = sequence.sampling.max_tokens - len(ended.answer_ids)
    known = sequence.prompt + ended.answer_ids
    room_tokens = -(-(len(known) + 2) // BLOCK_TOKENS) * BLOCK_TOKENS
    again, events = make_sequence(4, left, seed=sequence.seed, **options_of(room_tokens))
    again.prompt = known
    rig.scheduler.add(again)
    return again, events


def run_within_budget(rig, asked):
    """Run to the end; return what was answered, and how often an answer was handed over."""
    handed, going = 0, dict(enumerate(asked))
    said = dict.fromkeys(going, ())
    for _ in range(50_000):
        if not any(rig.queue):
            return said, handed
        rig.scheduler.iterate()
        held = sum(sequence.cache.size_bytes for sequence in rig.queue)
        assert held <= rig.budget.reserved_bytes <= rig.budget.total_bytes
        for number, (sequence, events) in list(going.items()):
            if not (events and isinstance(events[-1], Ended | Broke)):
                continue
            ended = last_of(events)
            said[number] += tuple(ended.answer_ids)
            del going[number]
            if ended.is_handover:
                handed += 1
                known = sequence.prompt + ended.answer_ids
                # Before its first step, its last token is not in the cache yet.
                assert sequence.cache.tokens == (known if ended.answer_ids else known[:-1])
                going[number] = resume(rig, sequence, ended)
    pytest.fail("something never ended")


def wanted(asked):
    return {
        number: tuple(expected(s.prompt, s.seed, s.sampling.max_tokens))
        for number, (s, _) in enumerate(asked)
    }


@pytest.mark.parametrize("launch_waits", [False, True])
def test_the_later_of_two_long_answers_gives_its_memory_to_the_first(launch_waits):
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES, launch_waits=launch_waits)
    asked = [add(rig, 900, seed=seed) for seed in (1, 2)]
    said, handed = run_within_budget(rig, asked)

    assert handed == 1
    assert is_undisturbed(*asked[0])
    assert said == wanted(asked)
    assert rig.budget.reserved_bytes == 0


def test_many_long_answers_come_to_their_ends():
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES)
    asked = [
        add(
            rig, 300 + 70 * seed, seed=seed, priority=list(Priority)[seed % 2], tenant=str(seed % 3)
        )
        for seed in range(9)
    ]
    said, handed = run_within_budget(rig, asked)

    assert said == wanted(asked)
    assert handed


def test_an_answer_whose_agent_has_another_turn_waiting_keeps_its_memory():
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES)
    asked = [add(rig, 900, seed=seed) for seed in (1, 2)]
    asked[1][0].is_preemptible = lambda: False
    said, handed = run_within_budget(rig, asked)

    assert handed == 1
    assert is_undisturbed(*asked[1])
    assert said == wanted(asked)


def test_who_has_most_answers_gives_memory_back():
    """Not the tenant whose one answer has come last."""
    rig = SchedulerRig(total_bytes=6 * ROOM_BYTES)
    greedy = [add(rig, 700, seed=seed, tenant="greedy") for seed in (1, 2, 3)]
    small, small_events = add(rig, 700, seed=4, tenant="small")
    _, handed = run_within_budget(rig, [*greedy, (small, small_events)])

    assert handed
    assert is_undisturbed(small, small_events)
    assert is_undisturbed(*greedy[0])


def test_an_answer_that_alone_outgrows_the_budget_ends_there():
    rig = SchedulerRig(total_bytes=3 * ROOM_BYTES)
    sequence, events = add(rig, 5_000)

    _, handed = run_within_budget(rig, [(sequence, events)])
    ended = last_of(events)
    assert not handed
    assert ended.reason is FinishReason.LENGTH
    assert 3 * BLOCK_TOKENS - 8 <= len(sequence.cache.tokens) <= 3 * BLOCK_TOKENS
    assert sequence.cache.tokens == sequence.prompt + ended.answer_ids


def test_idle_caches_make_room_before_an_answer_has_to_wait():
    asked = []
    rig = SchedulerRig(total_bytes=3 * ROOM_BYTES, make_room=asked.append)
    rig.budget.set_idle(2 * ROOM_BYTES)
    sequence, events = add(rig, 400)
    for _ in range(2_000):
        if asked:
            rig.budget.set_idle(0)
        rig.scheduler.iterate()
        assert not rig.queue.paused
        if any(isinstance(event, Ended) for event in events):
            break

    assert asked == [ROOM_BYTES]
    assert is_undisturbed(sequence, events)


@pytest.mark.nightly
def test_long_answers_of_a_node_stay_within_its_memory(tmp_path):
    model = str(write_model(tmp_path / "model", LLAMA))
    with running(tmp_path, model) as probe:
        per_block = probe.node.spec.resident_bytes(BLOCK_TOKENS)
        alone = [
            ask(probe, f"{name} says", agent=name, max_tokens=1_500, ignore_eos=True).text
            for name in ("ann", "bob")
        ]
    total_bytes = max(9 * per_block, MIB)
    assert total_bytes < 2 * 6 * per_block, "both do not fit"
    with running(tmp_path / "small", model, hot_bytes=total_bytes) as service:
        engine, over = service.node.engine.engine, []
        queue, launch = service.node.engine._queue, engine.launch

        def watched(slots):
            launch(slots)
            held = sum(sequence.cache.size_bytes for sequence in queue)
            if held > service.node.engine.budget.reserved_bytes or held > total_bytes:
                over.append(held)

        engine.launch, told, handed = watched, {}, []

        def turn(name):
            told[name] = "".join(follow(service, name, handed))

        threads = [threading.Thread(target=turn, args=(name,)) for name in ("ann", "bob")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert not over
        assert handed
        assert [told["ann"], told["bob"]] == alone


def follow(service, name, handed):
    """Read an answer as the router does: where it is handed over, it is asked for again."""
    resume = None
    while True:
        sampling = Sampling(max_tokens=1_500, ignore_eos=True)
        request = GenerateRequest(
            OperationId(f"turn-{name}"), TENANT, identity_of(name), sampling,
            prompt=f"{name} says", epoch=1, resume=resume,
        )  # fmt: skip

        async def read(request=request):
            return [event async for event in service.node.generate(request)]

        events = asyncio.run_coroutine_threadsafe(read(), service._loop).result(240)
        yield from (event.text for event in events if isinstance(event, Delta))
        if not isinstance(events[-1], HandedOver):
            assert isinstance(events[-1], Finished)
            assert events[-1].completion_tokens == 1_500
            return
        handed.append(name)
        resume = events[-1].resume
