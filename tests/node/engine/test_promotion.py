"""A background sequence that waited too long delays no interactive one by more than a chunk."""

import pytest

from fabric.turn.generation import Priority
from node.engine.sequence import Ended, Produced
from node.limits import BACKGROUND_WAIT_S_MAX
from tests.node.fake_engine import TOKEN_BYTES, SchedulerRig, is_undisturbed

BACKGROUND = {"priority": Priority.BACKGROUND}
LONG, URGENT = 30_000, 3_000


class Traffic:
    """Endless interactive prompts; each may arrive while the last chunk is computed."""

    def __init__(self, rig, at_once):
        self.rig = rig
        self.spans = {}  # by interactive sequence: the log from its arrival to its first token
        self._at_once = at_once
        self._background = set()  # their caches
        self._began = 0  # the log's length before the last iteration

    def add_background(self, tokens, **fields):
        sequence, events = self.rig.add(tokens, **BACKGROUND, **fields)
        self._background.add(sequence.cache)
        return sequence, events

    def iterate(self):
        for _ in range(self._at_once - sum(end is None for _, end in self.spans.values())):
            self._add()
        self._began = len(self.rig.engine.log)
        self.rig.scheduler.iterate()

    def _add(self):
        arrival = self._began

        def note(event):
            if isinstance(event, Produced) and self.spans[sequence][1] is None:
                self.spans[sequence] = arrival, len(self.rig.engine.log)

        sequence, _ = self.rig.add(URGENT, 2, seed=len(self.spans), emit=note)
        self.spans[sequence] = arrival, None

    def most_delays(self):
        """Return the most chunks of background prompts that one interactive prompt waited for."""
        log = self.rig.engine.log
        return max(
            sum(
                entry[0] == "prefill" and entry[1] in self._background for entry in log[arrival:end]
            )
            for arrival, end in self.spans.values()
        )


@pytest.mark.parametrize("active_max", [1, 2, 8])
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_starved_prompt_progresses_and_delays_each_turn_by_one_chunk(active_max, at_once):
    rig = SchedulerRig(active_max=active_max, tokens_per_s=2_000.0)
    traffic = Traffic(rig, at_once)
    slow, events = traffic.add_background(LONG)
    for _ in range(4_000):
        traffic.iterate()
        if any(isinstance(event, Ended) for event in events):
            break

    assert is_undisturbed(slow, events), "the starved prompt completed"
    assert traffic.most_delays() == 1
    assert rig.clock.now_s > BACKGROUND_WAIT_S_MAX


def test_several_starved_prompts_delay_no_turn_twice():
    rig = SchedulerRig(active_max=4, tokens_per_s=2_000.0)
    traffic = Traffic(rig, at_once=2)
    slow = [traffic.add_background(LONG, seed=9_000 + number) for number in range(3)]
    for _ in range(3_000):
        traffic.iterate()

    assert traffic.most_delays() == 1
    assert any(isinstance(event, Ended) for event in slow[0][1])


def test_a_promoted_sequence_takes_no_slot_of_an_interactive_one():
    rig = SchedulerRig(active_max=1)
    running, _ = rig.add(5, answer_tokens=10_000)
    slow, events = rig.add(600, answer_tokens=40, **BACKGROUND)
    rig.run(3)
    rig.clock.now_s += BACKGROUND_WAIT_S_MAX
    rig.run(2)
    assert slow in rig.queue.running
    assert running in rig.queue.decoding
    rig.run(60)

    assert is_undisturbed(slow, events)
    assert running in rig.queue.decoding


def test_a_promoted_sequence_takes_no_slot_that_becomes_free():
    rig = SchedulerRig(active_max=1)
    first, _ = rig.add(5, answer_tokens=20)
    slow, _ = rig.add(9_000, answer_tokens=400, **BACKGROUND)
    rig.run(2)
    rig.clock.now_s += BACKGROUND_WAIT_S_MAX
    rig.run(2)
    _, events = rig.add(50, answer_tokens=5, seed=2)
    while first in rig.queue.running:
        rig.scheduler.iterate()
    rig.run(3)

    assert any(isinstance(event, Produced) for event in events), "it takes the free slot at once"
    assert slow in rig.queue.running, "the promoted one keeps running"


def test_a_promoted_sequence_gives_its_memory_to_an_interactive_one():
    rig = SchedulerRig(active_max=4, total_bytes=TOKEN_BYTES * 12_000)
    slow, slow_events = rig.add(
        9_000, reserve_bytes=TOKEN_BYTES * 9_000, is_preemptible=lambda: True, **BACKGROUND
    )
    slow.is_promoted = True
    rig.run(2)
    urgent, events = rig.add(6_000, seed=2, reserve_bytes=TOKEN_BYTES * 6_000)
    rig.run(2)

    assert slow_events[-1].is_handover
    rig.run()
    assert is_undisturbed(urgent, events)


def test_a_promoted_sequence_takes_no_memory_that_an_interactive_one_lacks():
    rig = SchedulerRig(active_max=4, total_bytes=TOKEN_BYTES * 12_000)
    rig.add(9_000, answer_tokens=50, reserve_bytes=TOKEN_BYTES * 9_000)
    rig.run(1)
    lacking, _ = rig.add(6_000, seed=2, reserve_bytes=TOKEN_BYTES * 6_000)
    slow, _ = rig.add(600, seed=3, reserve_bytes=TOKEN_BYTES * 1_000, **BACKGROUND)
    slow.is_promoted = True
    rig.run(3)

    assert lacking in rig.queue.waiting
    assert slow in rig.queue.waiting


def test_a_promoted_sequence_keeps_memory_that_no_interactive_one_could_use_yet():
    """The interactive one waits for a slot, and gets memory with it."""
    rig = SchedulerRig(active_max=1, total_bytes=TOKEN_BYTES * 12_000)
    running, _ = rig.add(3_000, answer_tokens=300, reserve_bytes=TOKEN_BYTES * 4_000)
    rig.run(5)
    slow, slow_events = rig.add(
        600,
        seed=3,
        answer_tokens=20,
        reserve_bytes=TOKEN_BYTES * 7_000,
        is_preemptible=lambda: True,
        **BACKGROUND,
    )
    slow.is_promoted = True
    rig.run(1)
    urgent, events = rig.add(3_000, seed=2, reserve_bytes=TOKEN_BYTES * 4_000)
    rig.run(60)

    assert running in rig.queue.decoding
    assert is_undisturbed(slow, slow_events)
    rig.run()
    assert is_undisturbed(urgent, events)
