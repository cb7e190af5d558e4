"""Last decisions of placement with their outcomes, in memory.

Each entry has the terms that the decision was made of, and the times and tokens of its turn. As
rows of a trace, `macfabric simulate` replays them. Entries name agents as logs do, and contents by
numbers that mean nothing outside one answer.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fabric.ids import NodeName, TurnId
from fabric.ports import Clock
from fabric.turn.generation import Admitted, TurnTimes
from router.limits import DECISION_PIECES_MAX, DECISIONS_KEPT_MAX
from router.placement.decision import Decision
from router.prompt import Prompt
from router.telemetry import Telemetry
from router.turns.open_turn import EndedTurn

BLOCK_TOKENS: Final = 128  # per hash of a trace's row
RUNNING: Final = "running"
ID_PREFIX: Final = "dec_"


@dataclass(slots=True, eq=False)
class DecidedTurn:
    """Turn with its decision; times that have not come yet are None."""

    agent: str  # its name in logs
    decision: Decision
    admitted: Admitted
    prompt: Prompt
    started_s: float
    at_s: float  # wall clock
    admitted_s: float  # since its start, likewise the others
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = RUNNING
    completion_tokens: int = 0
    turn: TurnId | None = None
    times: TurnTimes | None = None  # None: its node has not sent them
    number: int = 0  # of all decisions since the router's start

    def as_row(self) -> dict[str, Any]:
        """Return the entry for an API."""
        decision, admitted = self.decision, self.admitted
        terms = {name: round(value, 4) for name, value in asdict(decision.terms).items()}
        return {
            "id": f"{ID_PREFIX}{self.number}",
            "object": "placement.decision",
            "at_s": round(self.at_s, 3),
            "turn": self.turn,
            "agent": self.agent,
            "node": decision.node,
            "how": decision.how.value,
            "from": decision.source,
            "terms": terms,
            "first_token_estimate_s": round(decision.terms.first_token_s, 4),
            "outcome": self.outcome,
            "served_by": admitted.node,
            "prompt_tokens": admitted.prompt_tokens,
            "cached_tokens": admitted.cached_tokens,
            "cache": admitted.cache.value,
            "completion_tokens": self.completion_tokens,
            "admitted_s": _round_s(self.admitted_s),
            "first_token_s": _round_s(self.first_token_s),
            "ended_s": _round_s(self.ended_s),
            "times": self.times and {n: _round_s(s) for n, s in asdict(self.times).items()},
        }


def _round_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


@dataclass(slots=True, eq=False)
class DecisionLog:
    """Last decisions, the oldest first."""

    clock: Clock
    telemetry: Telemetry
    entries: deque[DecidedTurn] = field(default_factory=deque)
    _pieces_count: int = 0
    _count: int = 0

    def add(
        self,
        agent: str,
        decision: Decision,
        admitted: Admitted,
        prompt: Prompt,
        started_s: float,
        turn: TurnId | None = None,
    ) -> DecidedTurn:
        """Keep a decision whose turn was just admitted; drop the oldest of too many."""
        now_s = self.clock.monotonic_s()
        at_s = self.clock.wall_s() - (now_s - started_s)
        kept = Prompt(
            sketch=prompt.sketch, sketch_ends=prompt.sketch_ends, bytes_count=prompt.bytes_count
        )
        entry = DecidedTurn(
            agent, decision, admitted, kept, started_s, at_s, now_s - started_s, turn=turn
        )
        self._count += 1
        entry.number = self._count
        self.entries.append(entry)
        self._pieces_count += len(kept.sketch)
        while len(self.entries) > 1 and (
            len(self.entries) > DECISIONS_KEPT_MAX or self._pieces_count > DECISION_PIECES_MAX
        ):
            self._pieces_count -= len(self.entries.popleft().prompt.sketch)
        return entry

    def note_first_token(self, entry: DecidedTurn) -> None:
        """Note a turn's first token, and how far the estimates were off."""
        if entry.first_token_s is None:
            entry.first_token_s = self.clock.monotonic_s() - entry.started_s
            self.telemetry.note_estimate(
                entry.decision.terms, entry.admitted_s, entry.first_token_s
            )

    def end(self, entry: DecidedTurn, ended: EndedTurn) -> None:
        """Note a turn's end."""
        entry.ended_s = self.clock.monotonic_s() - entry.started_s
        entry.outcome, entry.completion_tokens = ended.outcome, ended.completion_tokens
        entry.times = ended.times


def trace_rows(entries: Iterable[DecidedTurn]) -> Iterator[dict[str, Any]]:
    """Yield the turns that were answered as rows of a trace, in order of their requests."""
    answered = [entry for entry in entries if entry.outcome == "ok" and entry.completion_tokens]
    answered.sort(key=lambda entry: entry.at_s)
    # One ratio for all: equal beginnings of prompts are then equal blocks.
    all_tokens = sum(entry.admitted.prompt_tokens for entry in answered)
    bytes_per_token = sum(entry.prompt.bytes_count for entry in answered) / max(1, all_tokens)
    numbers: dict[object, int] = {}
    before: dict[str, DecidedTurn] = {}  # the last turn of each agent
    for entry in answered:
        names = _block_names(entry, bytes_per_token)
        last, before[entry.agent] = before.get(entry.agent), entry
        yield {
            "timestamp": round((entry.at_s - answered[0].at_s) * 1000),
            "input_length": entry.admitted.prompt_tokens,
            "output_length": entry.completion_tokens,
            "block_length": BLOCK_TOKENS,
            "hash_ids": [numbers.setdefault(name, len(numbers)) for name in names],
            "session_id": entry.agent,
            "continues": last is not None and _continues(last, entry),
            "node": NodeName(entry.admitted.node),
            "ttft_ms": round(1000 * (entry.first_token_s or 0.0)),
        }


def _continues(last: DecidedTurn, entry: DecidedTurn) -> bool:
    """Return whether a prompt has all of the agent's turn before, and its answer."""
    sketch = last.prompt.sketch
    held_tokens = last.admitted.prompt_tokens + last.completion_tokens
    # The last piece ends where the prompt did; the next one's may be longer.
    has_all = entry.prompt.sketch[: len(sketch) - 1] == sketch[:-1]
    return bool(sketch) and has_all and held_tokens < entry.admitted.prompt_tokens


def _block_names(entry: DecidedTurn, bytes_per_token: float) -> Sequence[object]:
    """Name a prompt's blocks: equal ones of two prompts begin alike up to their ends.

    A block is named by the piece of the sketch in which it ends; after the sketch, by its turn.
    """
    prompt, tokens = entry.prompt, entry.admitted.prompt_tokens
    names: list[object] = []
    for number in range(-(-tokens // BLOCK_TOKENS)):
        end = min(tokens, (number + 1) * BLOCK_TOKENS) * bytes_per_token
        piece = bisect_left(prompt.sketch_ends, round(end))
        is_known = piece < len(prompt.sketch)
        names.append((number, prompt.sketch[piece]) if is_known else (id(entry), number))
    return names
