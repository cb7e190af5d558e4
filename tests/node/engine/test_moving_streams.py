"""While a stream is silent because its agent moves, other prompts wait for a bounded time."""

import pytest

from fabric.ids import MigrationId
from fabric.turn.generation import Resumption
from node.engine.sequence import Ended, Started
from node.limits import PREFILL_CHUNK_BUSY_S, PREFILL_CHUNK_S, PREFILL_HOLD_S
from tests.node.fake_engine import SchedulerRig, is_undisturbed

MOVE = MigrationId("move-1")
TOKENS_PER_S = 2_000.0


@pytest.fixture
def rig():
    return SchedulerRig(tokens_per_s=TOKENS_PER_S)


def chunks(rig, cache=None):
    log = [entry for entry in rig.engine.log if entry[0] == "prefill"]
    return [entry[2] for entry in log if cache is None or entry[1] is cache]


def test_prefill_is_held_between_last_step_of_moving_stream_and_its_save(rig):
    stream, events = rig.add(3, answer_tokens=60)
    rig.run(3)
    rig.add(16_000)
    rig.run(2)
    began = len(chunks(rig))

    rig.moving.begin_pause(MOVE)
    stream.yielding.set()
    rig.run(5)
    assert isinstance(events[-1], Ended)
    assert len(chunks(rig)) == began, "its save waits for the engine"

    rig.moving.end_pause(MOVE)
    rig.run(1)
    assert len(chunks(rig)) == began + 1


def test_prefill_hold_for_a_move_is_bounded(rig):
    rig.add(16_000)
    rig.run(1)
    rig.moving.begin_pause(MOVE)
    rig.moving.begin_pause(MOVE)
    rig.clock.now_s += PREFILL_HOLD_S - 0.01
    assert not rig.scheduler.iterate()
    rig.moving.begin_pause(MOVE)  # repeated
    rig.clock.now_s += 0.02
    assert rig.scheduler.iterate()


def test_preemption_that_admits_no_sequence_leaves_the_engine_idle():
    """Idle caches fill the memory that the waiting sequence needs, and are not evicted yet."""
    rig = SchedulerRig(active_max=2, total_bytes=100, make_room=lambda size_bytes: None)
    for _ in range(2):
        rig.add(16_000, tenant="a", reserve_bytes=10)
    rig.run(1)
    rig.budget.set_idle(75)
    waiting, _ = rig.add(500, tenant="b", reserve_bytes=20)
    rig.moving.begin_pause(MOVE)
    assert not rig.scheduler.iterate(), "nothing changed, so the engine may idle"
    assert waiting in rig.queue.waiting
    assert len(rig.queue.running) == 2


def test_prefill_progresses_despite_endless_moves(rig):
    """Endless moves hold a prompt up to the limit; then one short chunk runs."""
    prompt, events = rig.add(16_000, answer_tokens=2)
    rig.run(2)
    last_s, at = rig.clock.now_s, len(chunks(rig))
    for number in range(100_000):
        rig.moving.begin_pause(MigrationId(f"move-{number}"))
        rig.clock.now_s += 0.01
        rig.scheduler.iterate()
        if len(chunks(rig)) > at:
            at = len(chunks(rig))
            assert rig.clock.now_s - last_s <= PREFILL_HOLD_S + PREFILL_CHUNK_BUSY_S + 0.03
            last_s = rig.clock.now_s
        if not any(rig.queue):
            break

    assert is_undisturbed(prompt, events)


def test_arriving_stream_is_not_held_and_gets_a_slot_first():
    rig = SchedulerRig(active_max=2)
    rig.add(16_000)
    rig.add(5, answer_tokens=4)
    rig.run(1)
    later, _ = rig.add(5, seed=2)  # waits for a slot
    before = Resumption((7, 8), 9, (), 3)
    moved, events = rig.add(2_000, seed=3, cached=1_990, resumed=before, answer_ids=[7, 8])
    rig.moving.begin_pause(MOVE)
    at = len(chunks(rig))
    for _ in range(20):
        if not events:
            rig.scheduler.iterate()

    assert isinstance(events[0], Started)
    assert later in rig.queue.waiting, "it arrived first, but no client reads it yet"
    assert len(chunks(rig)) == at + 1 == at + len(chunks(rig, moved.cache))


@pytest.mark.parametrize("is_coming", [False, True], ids=["alone", "a stream is coming"])
def test_prefill_chunks_are_short_while_a_stream_is_arriving(is_coming):
    rig = SchedulerRig(tokens_per_s=TOKENS_PER_S)
    rig.moving.are_coming = is_coming
    rig.add(16_000)
    rig.run(3)

    limit_s = PREFILL_CHUNK_BUSY_S if is_coming else PREFILL_CHUNK_S
    longest_s = chunks(rig)[-1] / TOKENS_PER_S
    assert limit_s / 2 < longest_s <= limit_s
