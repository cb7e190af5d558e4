"""The scheduler over a fake engine whose tokens reveal a lost or repeated one."""

import random

import pytest

from fabric.turn.generation import FinishReason, Priority
from node.engine.sequence import Broke, Ended, Produced, PromptEcho, Started
from node.limits import (
    BACKGROUND_WAIT_S_MAX,
    FIRST_TOKEN_CHUNK_TOKENS_MAX,
    PREFILL_CHUNK_BUSY_S,
    PREFILL_WARM_STREAK_MAX,
)
from tests.node.fake_engine import (
    BrokenError,
    FakeCache,
    SchedulerRig,
    is_undisturbed,
    last_of,
)

BACKGROUND = {"priority": Priority.BACKGROUND}
BOTH_ORDERS = pytest.mark.parametrize(
    "launch_waits", [False, True], ids=["launched first", "emitted first"]
)


def test_decode_step_precedes_every_chunk_and_chunk_size_follows_speed():
    rig = SchedulerRig(tokens_per_s=2_500.0)
    stream, stream_events = rig.add(3, answer_tokens=60)
    rig.run(3)
    long, long_events = rig.add(16_000, answer_tokens=2)
    began = len(rig.engine.log)
    rig.run()
    log = rig.engine.log[began:]
    chunks = [entry[2] for entry in log if entry[0] == "prefill"]
    kinds = [entry[0] for entry in log]

    assert is_undisturbed(stream, stream_events)
    assert is_undisturbed(long, long_events)
    assert chunks[0] == 512  # no speed is known yet
    assert set(chunks[1:-1]) == {512}
    assert 512 <= 2_500 * PREFILL_CHUNK_BUSY_S < 1_024
    first, last = kinds.index("prefill"), len(kinds) - kinds[::-1].index("prefill")
    assert all(
        "decode" in kinds[at - 1 : at] for at in range(first, last) if kinds[at] == "prefill"
    )


def test_warm_request_gets_its_first_token_within_two_iterations():
    rig = SchedulerRig()
    rig.add(16_000)
    rig.run(2)
    _, events = rig.add(9_000, cached=8_600)
    rig.run(2)

    assert any(isinstance(event, Produced) for event in events)


def test_warm_requests_do_not_starve_a_long_prompt():
    rig = SchedulerRig(active_max=32)
    rig.add(2, answer_tokens=10_000)
    long, _ = rig.add(20_000)
    for turn in range(3 * (PREFILL_WARM_STREAK_MAX + 1)):
        rig.add(300, 1, seed=turn)
        rig.run(1)

    # Its first chunk precedes all others; then one follows every full streak.
    chunks = [entry for entry in rig.engine.log if entry[:2] == ("prefill", long.cache)]
    assert len(chunks) == 3


def test_long_prompts_take_turns():
    rig = SchedulerRig()
    names = {rig.add(9_000, seed=seed)[0].cache: seed for seed in (1, 2, 3)}
    rig.run(6)

    assert [names[entry[1]] for entry in rig.engine.log] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("iterations", range(9))
def test_background_is_preempted_for_interactive_and_resumes(iterations):
    rig = SchedulerRig(active_max=1)
    paused, paused_events = rig.add(9_000, **BACKGROUND)
    rig.run(iterations)
    urgent, urgent_events = rig.add(5, seed=2)
    while not any(isinstance(event, Ended) for event in urgent_events):
        at = paused.cache.tokens_count
        rig.scheduler.iterate()
        assert paused.cache.tokens_count == at
    rig.run()

    assert is_undisturbed(paused, paused_events)
    assert is_undisturbed(urgent, urgent_events)


def test_background_waits_for_interactive_up_to_its_patience():
    rig = SchedulerRig(active_max=2)
    patient, events = rig.add(50, **BACKGROUND)
    other, other_events = rig.add(50, seed=2, **BACKGROUND)
    rig.run(1)
    done_at_s = {}
    for turn in range(200):
        rig.add(20, 4, seed=turn)
        rig.clock.now_s += 1.0
        rig.scheduler.iterate()
        assert sum(sequence.is_promoted for sequence in rig.queue) <= 1
        for name, seen in (("patient", events), ("other", other_events)):
            if seen and isinstance(seen[-1], Ended):
                done_at_s.setdefault(name, rig.clock.now_s)

    assert is_undisturbed(patient, events)
    assert is_undisturbed(other, other_events)
    assert min(done_at_s.values()) >= BACKGROUND_WAIT_S_MAX
    assert max(done_at_s.values()) <= 2 * BACKGROUND_WAIT_S_MAX


def test_interactive_prompts_are_computed_before_background_ones():
    rig = SchedulerRig()
    slow, _ = rig.add(6_000, **BACKGROUND)
    fast, _ = rig.add(6_000)
    rig.run(2)

    assert [entry[1] for entry in rig.engine.log] == [fast.cache, fast.cache]
    assert slow.cache.tokens_count == 0


def test_blocked_prompt_is_skipped_and_idle_iteration_is_reported():
    rig = SchedulerRig()
    blocked = [True]
    held, held_events = rig.add(5, is_blocked=lambda: blocked[0])
    free, free_events = rig.add(2_000, seed=2)
    done = [rig.scheduler.iterate() for _ in range(30)]

    assert is_undisturbed(free, free_events)
    assert held.cache.tokens_count == 0
    assert done[0]
    assert not done[-1]
    blocked[0] = False
    rig.run()
    assert is_undisturbed(held, held_events)


def test_restored_prompt_starts_once_its_last_block_is_read():
    rig = SchedulerRig()
    stream, stream_events = rig.add(3, answer_tokens=60)
    rig.run(3)
    restored, events = rig.add(600, cached=599)
    restored.awaited_tokens = 599
    read = rig.engine.launch

    def launch(slots):
        restored.awaited_tokens = None  # as another thread does, at any time
        return read(slots)

    rig.engine.launch = launch
    rig.run()

    assert is_undisturbed(restored, events)
    assert is_undisturbed(stream, stream_events)


def test_chunks_end_at_stops_and_report_progress():
    rig = SchedulerRig()
    rig.scheduler.prefill_speed.add(1_000, 1e-3)
    reached = []
    rig.add(3_000, stops=(0, 100, 1_000, 2_999, 5_000), reached=reached.append)
    rig.run()

    assert reached == [100, 1_000, 2_999]


@BOTH_ORDERS
@pytest.mark.parametrize("count", [2, FIRST_TOKEN_CHUNK_TOKENS_MAX])
def test_short_last_chunk_yields_the_first_token(count, launch_waits):
    rig = SchedulerRig(launch_waits=launch_waits)
    sequence, events = rig.add(1_000 + count, cached=1_000)
    rig.run(1)

    assert rig.engine.log == [("prefill", sequence.cache, count)]
    assert sequence.slot.pending_is_sampled
    rig.run()
    assert is_undisturbed(sequence, events)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_tokens": 1_001 + FIRST_TOKEN_CHUNK_TOKENS_MAX},
        {"stops": (1_009,), "prompt_tokens": 1_010},
        {"trimmed": object(), "prompt_tokens": 1_010},
        {"echo": PromptEcho("", []), "prompt_tokens": 1_010},
    ],
    ids=["long", "state kept before it", "state kept at its end", "scored"],
)
def test_last_token_of_other_prompts_is_decoded_by_a_step(options):
    rig = SchedulerRig()
    rig.engine.score = lambda cache, tokens, *_: rig.engine.prefill(cache, tokens) and []
    count = options.pop("prompt_tokens")
    sequence, _ = rig.add(count, cached=1_000, **options)
    rig.run(1)

    assert sequence.cache.tokens_count == count - 1
    assert not sequence.slot.pending_is_sampled


def test_rows_in_place_after_holes_are_neither_computed_nor_counted():
    """A chunk ends at the end of its hole; the next chunk fills the next hole."""
    rig = SchedulerRig()
    rig.scheduler.prefill_speed.add(1_000, 1e-3)
    reached, left = [], []

    def note(tokens_count):
        reached.append(tokens_count)
        left.append(edited.prefill_left)

    edited, events = rig.add(3_000, cached=100, reached=note)
    edited.cache.put_ahead(120, edited.input.prompt[120:1_000])
    edited.cache.put_ahead(1_700, edited.input.prompt[1_700:2_900])
    assert edited.prefill_left == 20 + 700 + 99
    rig.run()

    assert is_undisturbed(edited, events)
    assert [entry[2] for entry in rig.engine.log if entry[0] == "prefill"] == [20, 700, 99]
    assert reached == [1_000, 2_900, 2_999]
    assert left == [799, 99, 0]


def test_decoding_starts_once_the_last_hole_is_filled():
    rig = SchedulerRig()
    edited, events = rig.add(500, cached=100)
    edited.cache.put_ahead(101, edited.input.prompt[101:499])
    rig.run()

    assert is_undisturbed(edited, events)
    assert [entry[2] for entry in rig.engine.log if entry[0] == "prefill"] == [1]


def raises(*_):
    raise BrokenError


FAILURES = {
    "cache in prefill": lambda one: setattr(one.cache, "is_broken", True),
    "cache in decode": lambda one: setattr(one.cache, "fails_at", 45),
    "cache in its first step": lambda one: setattr(one.cache, "fails_at", 0),
    "text": lambda one: setattr(one.answer, "fails_at", 3),
    "text at the end": lambda one: setattr(one.answer, "finish", raises),
    "granted": lambda one: setattr(one, "granted", raises),
    "reached": lambda one: setattr(one, "reached", raises),
    "is_blocked": lambda one: setattr(one, "is_blocked", raises),
    "cache that shrank": lambda one: one.input.prompt.clear(),
}


@BOTH_ORDERS
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_failing_sequence_does_not_affect_others(failure, launch_waits):
    rig = SchedulerRig(launch_waits=launch_waits)
    good = [rig.add(40, seed=seed) for seed in (1, 2)]
    bad, bad_events = rig.add(40, seed=3, reserve_bytes=100)
    failure(bad)
    good.append(rig.add(600, seed=4))
    rig.run()

    assert isinstance(last_of(bad_events), Broke)
    assert all(is_undisturbed(*one) for one in good)
    assert rig.budget.reserved_bytes == 0


def test_failing_sampler_or_listener_ends_only_its_sequence():
    rig = SchedulerRig()
    good, events = rig.add(40)
    _, no_sampler = rig.add(40, seed=2, top_k=666)
    deaf, _ = rig.add(40, seed=3, emit=raises)
    rig.run()

    assert is_undisturbed(good, events)
    assert isinstance(last_of(no_sampler), Broke)
    assert deaf.cancelled.is_set()


@BOTH_ORDERS
@pytest.mark.parametrize("seed", range(10))
def test_cancelled_sequences_end_once_and_others_are_unchanged(seed, launch_waits):
    rng = random.Random(seed)
    rig = SchedulerRig(active_max=3, total_bytes=3_000, launch_waits=launch_waits)
    added = []
    for number in range(60):
        added.append(
            rig.add(
                rng.randrange(1, 900),
                rng.randrange(1, 12),
                seed=number,
                priority=rng.choice(list(Priority)),
                reserve_bytes=rng.randrange(1_500),
            )
        )
        rig.run(rng.randrange(3))
        for sequence, _ in rng.sample(added, len(added) // 6):
            sequence.cancelled.set()
        before = [len(events) for _, events in added]
        rig.scheduler.iterate()
        for (sequence, events), count in zip(added, before, strict=True):
            if sequence.cancelled.is_set():  # within one iteration, and no event follows
                assert isinstance(events[-1], Ended)
                assert len(events) <= count + 1
    rig.run()

    for sequence, events in added:
        reason = last_of(events).reason
        if reason is None:
            decoded = events[-1].answer_ids
            assert (
                sequence.cache.tokens
                == (sequence.input.prompt + decoded)[: len(sequence.cache.tokens)]
            )
        else:
            assert reason is FinishReason.LENGTH
            assert is_undisturbed(sequence, events)
    assert rig.budget.reserved_bytes == 0
    assert len({last_of(events).reason for _, events in added}) == 2


@BOTH_ORDERS
def test_sequence_is_independent_of_the_batch(launch_waits):
    """The fake depends on history only, so this checks order and slots, not numerics."""
    rig = SchedulerRig(active_max=5, launch_waits=launch_waits)
    added = [rig.add(10 * seed, answer_tokens=seed, seed=seed) for seed in range(1, 9)]
    rig.run()

    assert all(is_undisturbed(*one) for one in added)
    assert isinstance(added[0][0].cache, FakeCache)


def test_sampled_token_is_emitted_before_a_blocking_launch():
    """The last token is emitted a step before the end, which waits until the cache holds it."""
    rig = SchedulerRig(launch_waits=True)
    log = rig.engine.log
    rig.add(4, answer_tokens=2, cached=3, emit=lambda event: log.append((type(event), None)))
    rig.run()

    kinds = [kind for kind, *_ in log]
    assert kinds == [Started, "decode", Produced, "decode", Produced, "decode", Ended]
