from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.policy import Capacity, Preempt, Start, next_move, next_prompt, next_starved
from node.limits import (
    ADMISSION_PASSES_MAX,
    BACKGROUND_WAIT_S_MAX,
    PREFILL_WARM_STREAK_MAX,
    PREFILL_WARM_TOKENS,
)

_orders = count()
AMPLE = Capacity(slots=8, paused=8, memory_bytes=1_000)


@dataclass(eq=False)
class Item:
    is_urgent: bool = True
    reserve_bytes: int = 0
    needs_bytes: int = 0
    passed_count: int = 0
    prefill_left: int = 0
    served_s: float = 0.0
    served_order: int = 0
    order: int = field(default_factory=_orders.__next__)
    tenant: str = ""
    is_resumed: bool = False
    weight: float = 1.0
    is_promoted: bool = False
    is_delayed: bool = False


def interactive(needs_bytes=0, **fields):
    return Item(needs_bytes=needs_bytes, reserve_bytes=needs_bytes, **fields)


def background(needs_bytes=0, **fields):
    return Item(False, needs_bytes, needs_bytes, **fields)


def memory_holder(size_bytes):
    """Return a background sequence that holds memory."""
    return Item(is_urgent=False, reserve_bytes=size_bytes)


def test_start_order_is_interactive_then_paused_then_arrival():
    later, sooner = background(), background()
    later.order, sooner.order = sooner.order, later.order
    held, urgent = background(), interactive()
    waiting, started = [later, urgent, sooner], []
    paused = [held]
    while waiting or paused:
        move = next_move(waiting, paused, [], AMPLE)
        started.append(move.sequence)
        (paused if move.sequence in paused else waiting).remove(move.sequence)

    assert started == [urgent, held, sooner, later]


def test_latest_background_is_preempted_for_interactive_only():
    running = [background(), background(), interactive()]
    full = Capacity(slots=0, paused=1, memory_bytes=0)

    assert next_move([interactive()], [], running, full) == Preempt(running[1])
    assert next_move([background()], [], running, full) is None
    assert next_move([interactive()], [], running[2:], full) is None
    assert next_move([interactive()], [], running, Capacity(0, 0, 0)) is None


def test_small_request_overtakes_one_waiting_for_memory_a_few_times():
    big, small, warm = interactive(200), interactive(50), interactive(0)
    room = Capacity(slots=8, paused=8, memory_bytes=100)

    assert next_move([big, small], [], [], room) == Start(small, passed=(big,))
    assert next_move([big, warm], [], [], room) == Start(warm)  # needs no memory
    big.passed_count = ADMISSION_PASSES_MAX
    assert next_move([big, small], [], [], room) is None
    assert next_move([big, small], [paused := background()], [], room) == Start(paused)


def test_preemption_frees_no_memory():
    waiting, running = [interactive(150)], [memory_holder(40), memory_holder(60), interactive()]

    assert next_move(waiting, [], running, Capacity(slots=8, paused=8, memory_bytes=60)) is None


def test_warm_prompts_go_first_without_starving_long_ones():
    warm, warmer = interactive(prefill_left=500), interactive(prefill_left=3)
    long = interactive(prefill_left=PREFILL_WARM_TOKENS + 1, served_order=7)
    other = interactive(prefill_left=90_000, served_order=6)
    ready = [long, warm, other, warmer, background(prefill_left=1)]

    assert next_prompt(ready, 0) is warmer
    assert next_prompt(ready, PREFILL_WARM_STREAK_MAX) is other
    assert next_prompt([warm], PREFILL_WARM_STREAK_MAX) is warm
    assert next_prompt(ready[4:], 0) is ready[4]
    assert next_prompt([], 0) is None


def test_longest_starved_background_is_promoted():
    now_s = 100.0
    items = [background(served_s=now_s - BACKGROUND_WAIT_S_MAX + ago) for ago in (0.1, -1, -2)]

    assert next_starved(items, now_s) is items[2]
    assert next_starved(items[:1], now_s) is None


ITEMS = st.lists(
    st.builds(
        Item,
        is_urgent=st.booleans(),
        reserve_bytes=st.integers(0, 100),
        passed_count=st.integers(0, ADMISSION_PASSES_MAX),
        order=st.integers(0, 99),
    ),
    max_size=6,
    unique_by=lambda item: item.order,
)


def with_needs(items):
    for item in items:
        item.needs_bytes = item.reserve_bytes
    return items


def test_tenants_with_fewer_running_start_first_and_paused_before_new():
    older, newer = interactive(tenant="bob"), interactive(tenant="alice")
    assert next_move([older, newer], [], [], AMPLE) == Start(older)
    assert next_move([older, newer], [], [], AMPLE, {"bob": 1}) == Start(newer)
    assert next_move([older, newer], [], [], AMPLE, {"bob": 1, "alice": 2}) == Start(older)
    assert next_move([newer], [older], [], AMPLE, {"bob": 1}) == Start(older)


@given(
    waiting=ITEMS.map(with_needs),
    paused=ITEMS,
    running=ITEMS,
    slots=st.integers(0, 3),
    memory_bytes=st.integers(-50, 200),
)
def test_scheduling_moves_terminate_within_all_bounds(
    waiting, paused, running, slots, memory_bytes
):
    waiting, paused, running = list(waiting), list(paused), list(running)
    paused_max, moves = len(paused) + 2, 0
    while True:
        room = Capacity(slots, paused_max - len(paused), memory_bytes)
        move = next_move(waiting, paused, running, room)
        if move is None:
            break
        moves += 1
        assert moves < 100
        sequence = move.sequence
        if isinstance(move, Start):
            assert slots > 0
            assert sequence.needs_bytes <= max(0, memory_bytes)
            better = [s for s in [*waiting, *paused] if s.is_urgent and not s.needs_bytes]
            assert sequence.is_urgent or not better
            (paused if sequence in paused else waiting).remove(sequence)
            running.append(sequence)
            slots -= 1
            memory_bytes -= sequence.needs_bytes
            sequence.needs_bytes = 0
            continue
        assert not sequence.is_urgent
        assert any(s.is_urgent for s in [*waiting, *paused])
        running.remove(sequence)
        paused.append(sequence)
        slots += 1
        assert len(paused) <= paused_max

    startable = [s for s in [*waiting, *paused] if not s.needs_bytes]
    assert not (slots > 0 and startable)


@pytest.mark.parametrize("room", [AMPLE, Capacity(0, 0, 0)])
def test_no_move_without_waiting_or_paused_sequences(room):
    assert next_move([], [], [interactive(), background()], room) is None
