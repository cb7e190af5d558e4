"""Many threads calling the engine thread: limits, bursts, wake-ups and stops."""

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabric.errors import OverloadedError, RejectedError, RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.limits import ACTIVE_SEQUENCES_MAX
from fabric.turn.generation import Priority
from node.engine.engine_thread import EngineThread
from node.engine.memory_budget import MemoryBudget
from node.engine.sequence import Broke, Ended
from node.limits import ENGINE_CALLS_MAX
from tests.node.fake_engine import FakeEngine, is_undisturbed, last_of, make_sequence


class GatedThread:
    """An engine thread over a fake engine that can be blocked."""

    def __init__(self, *, waiting_max=256, total_bytes=1 << 40):
        self.thread = EngineThread(
            SystemClock(),
            active_max=4,
            waiting_max=waiting_max,
            exact_chunks=False,
            budget=MemoryBudget(total_bytes),
        )
        self.thread.start(lambda: (FakeEngine(), None))
        self.gate = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.gate.set()
        self.thread.stop()

    def block(self):
        """Keep the engine thread busy until the gate opens."""
        entered = threading.Event()
        self.thread.call(lambda: (entered.set(), self.gate.wait(60)))
        assert entered.wait(60)

    def add(self, *arguments, **options):
        events = queue.Queue()
        seen = []

        def emit(event):
            seen.append(event)
            if isinstance(event, Ended | Broke):
                events.put(event)

        sequence, _ = make_sequence(*arguments, emit=emit, **options)
        self.thread.submit(sequence)
        return sequence, seen, events


def test_queue_is_bounded_and_background_fills_at_most_half():
    with GatedThread(waiting_max=6) as gated:
        gated.block()
        waiting = [gated.add(5, seed=n, priority=Priority.BACKGROUND) for n in range(3)]
        with pytest.raises(OverloadedError):
            gated.add(5, priority=Priority.BACKGROUND)
        waiting += [gated.add(5, seed=n, tenant=f"tenant-{n}") for n in range(3, 6)]
        assert gated.thread.waiting_count == 6
        assert gated.thread.queued_tokens == 6 * 4
        with pytest.raises(OverloadedError):
            gated.add(5)
        gated.gate.set()
        for sequence, seen, done in waiting:
            done.get(timeout=60)
            assert is_undisturbed(sequence, seen)
        gated.add(5)[2].get(timeout=60)


def test_retry_after_follows_queue_length_and_turn_speed():
    with GatedThread(waiting_max=6) as gated:
        gated.add(5)[2].get(timeout=60)
        speed = gated.thread._scheduler.turn_speed
        assert speed.per_s > 0
        for turn_s, expected in ((4.0, 12.0), (0.001, 1.0), (1_000.0, 60.0)):
            speed.start(1, turn_s)
            gated.gate.clear()
            gated.block()
            waiting = [gated.add(5, seed=n, tenant=f"tenant-{n}") for n in range(6)]
            with pytest.raises(OverloadedError) as refused:
                gated.thread.check_waiting("tenant-7", Priority.INTERACTIVE)
            assert refused.value.retry_after_s == expected
            assert "Retry-After" in refused.value.message
            gated.gate.set()
            for _, _, done in waiting:
                done.get(timeout=60)


def test_pending_engine_calls_are_bounded(monkeypatch):
    monkeypatch.setattr("node.engine.engine_thread.ENGINE_CALLS_MAX", 3)
    with GatedThread() as gated:
        gated.block()
        calls = [gated.thread.call(lambda n=n: n) for n in range(3)]
        with pytest.raises(OverloadedError):
            gated.thread.call(int)
        gated.gate.set()
        assert [call.result(60) for call in calls] == [0, 1, 2]
        failing = gated.thread.call(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
    assert ENGINE_CALLS_MAX > ACTIVE_SEQUENCES_MAX


def test_request_larger_than_memory_is_refused_at_submission():
    with GatedThread(total_bytes=1_000) as gated, pytest.raises(RejectedError, match="shorten"):
        gated.add(5, reserve_bytes=1_001)


def test_submissions_and_cancels_from_many_threads():
    def client(number):
        rng = random.Random(number)
        ended = []
        for turn in range(12):
            seed = 100 * number + turn
            one = gated.add(
                rng.randrange(1, 2_000), rng.randrange(1, 40), seed=seed,
                priority=rng.choice(list(Priority)), reserve_bytes=rng.randrange(900),
            )  # fmt: skip
            if rng.random() < 0.4:
                one[0].cancelled.set()
                gated.thread.wake()
            ended.append(one)
            if rng.random() < 0.5:
                one[2].get(timeout=60)
        return ended

    with GatedThread(total_bytes=1_000) as gated:
        with ThreadPoolExecutor(8) as pool:
            served = [one for ended in pool.map(client, range(8)) for one in ended]
        # Interactive sequences go first, so a background one ends after all of them.
        while gated.thread.waiting_count or gated.thread.active_count:
            gated.thread.call(int).result(60)
        gated.thread.call(int).result(60)
    for sequence, seen, _ in served:
        assert last_of(seen).reason is None or is_undisturbed(sequence, seen)
        assert sequence.cancelled.is_set() or last_of(seen).reason is not None
    assert gated.thread.budget.reserved_bytes == 0


def test_blocked_sequence_is_polled_until_it_can_run():
    polls = []

    def is_blocked():
        polls.append(1)
        return len(polls) < 20

    with GatedThread() as gated:
        sequence, seen, done = gated.add(5, is_blocked=is_blocked)
        done.get(timeout=60)
        assert is_undisturbed(sequence, seen)


def test_failed_iteration_ends_its_sequences_but_not_the_thread(monkeypatch):
    with GatedThread() as gated:
        with monkeypatch.context() as broken:
            broken.setattr("node.engine.scheduler.next_move", lambda *_: 1 // 0)
            _, seen, done = gated.add(5)
            done.get(timeout=60)
            assert isinstance(last_of(seen), Broke)
        sequence, seen, done = gated.add(5)
        done.get(timeout=60)
        assert is_undisturbed(sequence, seen)


def test_stop_ends_all_sequences_and_refuses_new_ones():
    gated = GatedThread()
    gated.block()
    waiting = [gated.add(5, 10_000, seed=n) for n in range(6)]
    late = gated.thread.call(lambda: "done")
    stopping = threading.Thread(target=gated.thread.stop)
    stopping.start()
    while not gated.thread._is_stopping:
        pass
    with pytest.raises(RetryLaterError):
        gated.add(5)
    with pytest.raises(RetryLaterError):
        gated.thread.call(int)
    gated.gate.set()
    stopping.join(60)

    assert late.result(60) == "done"
    assert all(last_of(seen).reason is None for _, seen, _ in waiting)
