"""Checks and tables of the demo's turns."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from router.cli.demo.demo_client import DemoTurn, Pulse
from router.cli.output import print_table
from router.cli.terminal import print_line

COLD, HOT, DISK, PEER, KILLED = "cold", "hot", "disk", "peer", "killed"
STATES = (COLD, HOT, DISK, PEER, KILLED)
MEANING = {
    COLD: "first turn, everything is computed",
    HOT: "next turn, cache is at hand",
    DISK: "every node was killed (SIGKILL) and restarted",
    PEER: "moved to another node",
    KILLED: "its node was killed a moment ago",
}
REUSED_SHARE_MIN = 0.9  # of the previous prompt; the rest may be the end of the turn


def problem_of(turn: DemoTurn, previous: DemoTurn | None) -> str:
    """Return a turn's problem in words, or an empty text."""
    if turn.problem:
        return turn.problem
    if not turn.right:
        return f"answered {turn.answer!r} instead of {turn.expected!r}"
    if turn.state == KILLED:
        return ""  # any cache state; only the answer is checked
    if turn.cache != turn.state:
        return f"expected cache {turn.state}, the node reports {turn.cache or 'nothing'}"
    if turn.state == COLD:
        return f"{turn.cached_tokens} tokens reused in a cold turn" if turn.cached_tokens else ""
    least = int(REUSED_SHARE_MIN * previous.prompt_tokens) if previous else 1
    if turn.cached_tokens < least:
        return f"reused {turn.cached_tokens} tokens, at least {least} were stored"
    return ""


def ratios(turns: Iterable[DemoTurn]) -> dict[str, float]:
    """Return how many times faster than cold each state is, over all agents' medians."""
    times: dict[str, list[float]] = {}
    for turn in turns:
        if not turn.problem:
            times.setdefault(turn.state, []).append(turn.first_token_ms)
    cold = times.get(COLD)
    if not cold:
        return {}
    return {
        f"cold/{state}": round(median(cold) / max(median(times[state]), 0.1), 1)
        for state in (HOT, DISK, PEER)
        if state in times
    }


def show(agents: Sequence[str], turns: Sequence[DemoTurn], pulse: Pulse, seconds: float) -> None:
    """Print the table of agents by states, and its summary."""
    by_place = {(turn.agent, turn.state): turn for turn in turns}
    rows = [[agent, *(_cell(by_place.get((agent, state))) for state in STATES)] for agent in agents]
    print_table("Milliseconds to the first token", ("agent", *STATES), rows)
    for state in STATES:
        print_line(f"  {state:7} {MEANING[state]}")
    speedups = ratios(turns)
    if speedups:
        print_line("; ".join(f"{name} {times:g}x" for name, times in speedups.items()))
    right = sum(turn.right for turn in turns)
    print_line(
        f"{right} of {len(turns)} answers right; the endpoint answered {pulse.asked} pulses, "
        f"{len(pulse.failures)} failed, the slowest took {pulse.slowest_ms:.0f} ms; "
        f"{seconds:.1f} s in all"
    )


def as_record(turns: Sequence[DemoTurn]) -> list[dict[str, Any]]:
    """Return every figure of every turn."""
    return [asdict(turn) for turn in turns]


def _cell(turn: DemoTurn | None) -> str:
    if turn is None:
        return "-"
    if turn.problem:
        return "failed"
    mark = "" if turn.right else " WRONG"
    return f"{turn.first_token_ms:.0f} ({turn.cache}, {turn.node}){mark}"
