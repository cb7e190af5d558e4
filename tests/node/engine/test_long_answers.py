"""Answers that outgrow their reservation stay within the memory budget, wait, or end."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from fabric.errors import OverloadedError
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
from node.limits import AGENT_TURNS_WAITING_MAX
from node.turn import claim
from tests.node.fake_engine import (
    TOKEN_BYTES,
    SchedulerRig,
    expected,
    is_undisturbed,
    last_of,
    make_sequence,
)
from tests.support.on_loop import change
from tests.support.services import TENANT, ask, identity_of, running
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

ROOM_TOKENS = BLOCK_TOKENS
ROOM_BYTES = ROOM_TOKENS * TOKEN_BYTES


def grown_bytes(tokens_count):
    return -(-tokens_count // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES


def options_of(room_tokens=ROOM_TOKENS):
    """Reserve `room_tokens`; the answer may grow to any number of blocks."""
    return {
        "reserve_bytes": grown_bytes(room_tokens),
        "room_tokens": room_tokens,
        "grown_bytes": grown_bytes,
        "is_preemptible": lambda: True,
    }


def add(rig, answer_tokens, **options):
    return rig.add(4, answer_tokens, **options_of(), **options)


def resume(rig, sequence, ended):
    """Resume an answer that was handed over, as the router does."""
    tokens_left = sequence.input.sampling.max_tokens - len(ended.answer_ids)
    fed_ids = sequence.input.prompt + ended.answer_ids
    room_tokens = -(-(len(fed_ids) + 2) // BLOCK_TOKENS) * BLOCK_TOKENS
    again, events = make_sequence(
        4, tokens_left, seed=sequence.input.seed, **options_of(room_tokens)
    )
    again.input = replace(again.input, prompt=fed_ids)
    rig.scheduler.add(again)
    return again, events


def run_within_budget(rig, turns):
    """Run to the end; return the answers and the number of handovers."""
    handovers, unfinished = 0, dict(enumerate(turns))
    answers = dict.fromkeys(unfinished, ())
    for _ in range(50_000):
        if not any(rig.queue):
            return answers, handovers
        rig.scheduler.iterate()
        used_bytes = sum(sequence.cache.size_bytes for sequence in rig.queue)
        assert used_bytes <= rig.budget.reserved_bytes <= rig.budget.total_bytes
        for number, (sequence, events) in list(unfinished.items()):
            if not (events and isinstance(events[-1], Ended | Broke)):
                continue
            ended = last_of(events)
            answers[number] += tuple(ended.answer_ids)
            del unfinished[number]
            if ended.is_handover:
                handovers += 1
                fed_ids = sequence.input.prompt + ended.answer_ids
                # Before the first step, the last token is not in the cache yet. A background prompt
                # may be preempted before it is computed to its end.
                whole = fed_ids if ended.answer_ids else fed_ids[:-1]
                is_whole = bool(ended.answer_ids) or sequence.is_urgent
                count = len(whole) if is_whole else len(sequence.cache.tokens)
                assert sequence.cache.tokens == whole[:count]
                unfinished[number] = resume(rig, sequence, ended)
    pytest.fail("some sequence never ended")


def expected_answers(turns):
    return {
        number: tuple(expected(s.input.prompt, s.input.seed, s.input.sampling.max_tokens))
        for number, (s, _) in enumerate(turns)
    }


@pytest.mark.parametrize("launch_waits", [False, True])
def test_later_of_two_long_answers_yields_its_memory_to_the_first(launch_waits):
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES, launch_waits=launch_waits)
    turns = [add(rig, 900, seed=seed) for seed in (1, 2)]
    answers, handed = run_within_budget(rig, turns)

    assert handed == 1
    assert is_undisturbed(*turns[0])
    assert answers == expected_answers(turns)
    assert rig.budget.reserved_bytes == 0


def test_many_long_answers_complete():
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES)
    turns = [
        add(
            rig, 300 + 70 * seed, seed=seed, priority=list(Priority)[seed % 2], tenant=str(seed % 3)
        )
        for seed in range(9)
    ]
    answers, handed = run_within_budget(rig, turns)

    assert answers == expected_answers(turns)
    assert handed


def test_answer_that_cannot_be_preempted_keeps_its_memory():
    rig = SchedulerRig(total_bytes=5 * ROOM_BYTES)
    turns = [add(rig, 900, seed=seed) for seed in (1, 2)]
    kept = turns[1][0]
    kept.input = replace(kept.input, is_preemptible=lambda: False)
    answers, handed = run_within_budget(rig, turns)

    assert handed == 1
    assert is_undisturbed(*turns[1])
    assert answers == expected_answers(turns)


def test_tenant_with_most_answers_yields_memory():
    """A tenant with one answer keeps its memory, even if that answer is the latest."""
    rig = SchedulerRig(total_bytes=6 * ROOM_BYTES)
    greedy = [add(rig, 700, seed=seed, tenant="greedy") for seed in (1, 2, 3)]
    small, small_events = add(rig, 700, seed=4, tenant="small")
    _, handed = run_within_budget(rig, [*greedy, (small, small_events)])

    assert handed
    assert is_undisturbed(small, small_events)
    assert is_undisturbed(*greedy[0])


def test_sole_answer_outgrowing_the_budget_ends_with_length():
    rig = SchedulerRig(total_bytes=3 * ROOM_BYTES)
    sequence, events = add(rig, 5_000)

    _, handed = run_within_budget(rig, [(sequence, events)])
    ended = last_of(events)
    assert not handed
    assert ended.reason is FinishReason.LENGTH
    assert 3 * BLOCK_TOKENS - 8 <= len(sequence.cache.tokens) <= 3 * BLOCK_TOKENS
    assert sequence.cache.tokens == sequence.input.prompt + ended.answer_ids


def test_idle_caches_are_evicted_before_an_answer_waits():
    room_requests = []
    rig = SchedulerRig(total_bytes=3 * ROOM_BYTES, make_room=room_requests.append)
    rig.budget.set_idle(2 * ROOM_BYTES)
    sequence, events = add(rig, 400)
    for _ in range(2_000):
        if room_requests:
            rig.budget.set_idle(0)
        rig.scheduler.iterate()
        assert not rig.queue.paused
        if any(isinstance(event, Ended) for event in events):
            break

    assert room_requests == [ROOM_BYTES]
    assert is_undisturbed(sequence, events)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {**LLAMA, "num_hidden_layers": 3}
    return str(write_model(tmp_path_factory.mktemp("model") / "model", config))


@pytest.fixture(scope="module")
def small_bytes(model, tmp_path_factory):
    """Return a budget in which two long answers do not fit."""
    with running(tmp_path_factory.mktemp("probe"), model) as probe:
        per_block = probe.node.resources.identity.spec.resident_bytes(BLOCK_TOKENS)
    total_bytes = max(9 * per_block, MIB)
    assert total_bytes < 2 * 6 * per_block
    return total_bytes


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """Return the undisturbed answers of two agents."""
    with running(tmp_path_factory.mktemp("alone"), model) as service:
        return {name: "".join(follow(service, name, None)) for name in ("ann", "bob")}


@pytest.fixture
def small_service(model, small_bytes, tmp_path):
    with running(tmp_path, model, hot_bytes=small_bytes) as service:
        yield service


@pytest.mark.nightly
def test_long_answers_of_a_node_stay_within_its_memory_budget(small_service, small_bytes, alone):
    engine, excesses = small_service.node.resources.engine.engine, []
    queue, launch = small_service.node.resources.engine._queue, engine.launch

    def launch_and_check(slots):
        launch(slots)
        used_bytes = sum(sequence.cache.size_bytes for sequence in queue)
        if (
            used_bytes > small_service.node.resources.engine.budget.reserved_bytes
            or used_bytes > small_bytes
        ):
            excesses.append(used_bytes)

    engine.launch = launch_and_check
    assert run_both(small_service) == alone
    assert not excesses


def run_both(service, between=lambda _: None):
    """Run two agents' answers at once to their ends; call `between` at each hand-over."""
    handed = []

    def on_handed(name):
        handed.append(name)
        between(name)

    with ThreadPoolExecutor(2) as threads:
        turns = {
            name: threads.submit(lambda n=name: "".join(follow(service, n, on_handed)))
            for name in ("ann", "bob")
        }
        texts = {name: turn.result(240) for name, turn in turns.items()}
    assert handed
    return texts


def begin(service, name, prompt, max_tokens, resume=None):
    """Begin one turn; return the future of its events."""
    request = GenerateRequest(
        OperationId(f"turn-{name}-{prompt}"), TENANT, identity_of(name),
        Sampling(max_tokens=max_tokens, ignore_eos=True), prompt=prompt, epoch=1, resume=resume,
            was_admitted=resume is not None,
    )  # fmt: skip

    async def read():
        return [event async for event in service.node.turns.serve(request)]

    return asyncio.run_coroutine_threadsafe(read(), service._loop)


@pytest.mark.nightly
def test_turn_arriving_between_handovers_waits_for_the_answer(small_service, alone):
    """It waits for that answer's end, as it would with enough memory."""
    service, early_turns = small_service, []

    def begin_early_turn(name):
        if not early_turns:
            agent = service.node.resources.table.get((TENANT, identity_of(name).agent))
            early_turns.append(begin(service, name, "and then", 8))
            wait_until(lambda: agent.waiting_count or early_turns[0].done())

    texts = run_both(service, begin_early_turn)
    assert early_turns
    assert texts == alone
    assert isinstance(early_turns[0].result(240)[-1], Finished)


@pytest.mark.nightly
def test_abandoned_handover_does_not_block_later_turns(small_service, monkeypatch):
    monkeypatch.setattr(claim, "RESUME_WAIT_S", 0.2)
    left = []

    class LeftError(Exception):
        pass

    def leave(name):
        left.append(name)
        raise LeftError

    with suppress(LeftError):
        run_both(small_service, leave)
    reply = ask(small_service, "and then", agent=left[0], max_tokens=8, ignore_eos=True)
    assert isinstance(reply.events[-1], Finished)


@pytest.mark.nightly
def test_full_queues_do_not_refuse_resumed_answers(small_service, alone):
    node = small_service.node

    def fill_queues(name):
        agent = node.resources.table.get((TENANT, identity_of(name).agent))
        change(small_service, agent, waiting_count=AGENT_TURNS_WAITING_MAX)
        node.resources.engine._waiting_max = 0
        for other in (name, "carl"):
            with pytest.raises(OverloadedError):
                begin(small_service, other, "and then", 8).result(60)

    assert run_both(small_service, fill_queues) == alone


def follow(service, name, on_handed):
    """Read an answer as the router does: resume it after each hand-over."""
    resume = None
    while True:
        events = begin(service, name, f"{name} says", 1_500, resume).result(240)
        yield from (event.text for event in events if isinstance(event, Delta))
        if not isinstance(events[-1], HandedOver):
            assert isinstance(events[-1], Finished)
            assert events[-1].completion_tokens == 1_500
            return
        resume = events[-1].resume
        on_handed(name)
