"""Decisions of placement with what then happened: the last ones, in memory.

Each entry has the terms that the decision was made of, and the times and tokens of its turn. As
rows of a trace, `macfabric simulate` replays them. Entries name agents as logs do, and contents by
numbers that mean nothing outside one answer.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fabric.ids import NodeName
from fabric.ports import Clock
from fabric.turn.generation import Admitted
from router.limits import DECISION_PIECES_MAX, DECISIONS_KEPT_MAX
from router.placement.decision import Decision, Load, MoveAgent, Stay
from router.prompt import Prompt
from router.telemetry import Telemetry

BLOCK_TOKENS: Final = 128  # per hash of a trace's row
RUNNING: Final = "running"


@dataclass(slots=True, eq=False)
class DecidedTurn:
    """Turn with its decision; what has not happened yet is None."""

    agent: str  # as logs call it
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

    @property
    def how(self) -> str:
        """What was decided, in a word."""
        if isinstance(self.decision, MoveAgent):
            return "move"
        if isinstance(self.decision, Stay):
            return "stay"
        return "load" if isinstance(self.decision, Load) else "recompute"

    def as_row(self) -> dict[str, Any]:
        """Return the entry for an API."""
        decision, admitted = self.decision, self.admitted
        terms = {name: round(value, 4) for name, value in asdict(decision.terms).items()}
        return {
            "object": "placement.decision",
            "at_s": round(self.at_s, 3),
            "agent": self.agent,
            "node": decision.node,
            "how": self.how,
            "from": decision.ship.source if isinstance(decision, MoveAgent) else None,
            "terms": terms,
            "first_token_estimate_s": round(decision.terms.first_token_s, 4),
            "outcome": self.outcome,
            "served_by": admitted.node,
            "prompt_tokens": admitted.prompt_tokens,
            "cached_tokens": admitted.cached_tokens,
            "cache": admitted.cache.value,
            "completion_tokens": self.completion_tokens,
            "admitted_s": _rounded(self.admitted_s),
            "first_token_s": _rounded(self.first_token_s),
            "ended_s": _rounded(self.ended_s),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


@dataclass(slots=True, eq=False)
class DecisionLog:
    """Last decisions, the oldest first."""

    clock: Clock
    telemetry: Telemetry
    entries: deque[DecidedTurn] = field(default_factory=deque)
    _pieces_count: int = 0

    def add(
        self,
        agent: str,
        decision: Decision,
        admitted: Admitted,
        prompt: Prompt,
        started_s: float,
    ) -> DecidedTurn:
        """Keep a decision whose turn was admitted now; the oldest goes if there are too many."""
        now_s = self.clock.monotonic_s()
        at_s = self.clock.wall_s() - (now_s - started_s)
        kept = Prompt(
            sketch=prompt.sketch, sketch_ends=prompt.sketch_ends, bytes_count=prompt.bytes_count
        )
        entry = DecidedTurn(agent, decision, admitted, kept, started_s, at_s, now_s - started_s)
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
            self.telemetry.estimated(entry.decision.terms, entry.admitted_s, entry.first_token_s)

    def end(self, entry: DecidedTurn, outcome: str, completion_tokens: int) -> None:
        """Note a turn's end."""
        entry.ended_s = self.clock.monotonic_s() - entry.started_s
        entry.outcome, entry.completion_tokens = outcome, completion_tokens


def trace_rows(entries: Iterable[DecidedTurn]) -> Iterator[dict[str, Any]]:
    """Yield the turns that were answered as rows of a trace, in order of their requests."""
    answered = [entry for entry in entries if entry.outcome == "ok" and entry.completion_tokens]
    answered.sort(key=lambda entry: entry.at_s)
    numbers: dict[object, int] = {}
    for entry in answered:
        tokens = entry.admitted.prompt_tokens
        names = _block_names(entry, tokens)
        yield {
            "timestamp": round((entry.at_s - answered[0].at_s) * 1000),
            "input_length": tokens,
            "output_length": entry.completion_tokens,
            "block_length": BLOCK_TOKENS,
            "hash_ids": [numbers.setdefault(name, len(numbers)) for name in names],
            "session_id": entry.agent,
            "node": NodeName(entry.admitted.node),
            "ttft_ms": round(1000 * (entry.first_token_s or 0.0)),
        }


def _block_names(entry: DecidedTurn, tokens: int) -> Sequence[object]:
    """Name a prompt's blocks: equal ones of two prompts begin alike up to their ends.

    A block is named by the piece of the sketch in which it ends; behind the sketch, by its turn.
    """
    prompt = entry.prompt
    bytes_per_token = prompt.bytes_count / max(1, tokens)
    names: list[object] = []
    for number in range(-(-tokens // BLOCK_TOKENS)):
        end = min(tokens, (number + 1) * BLOCK_TOKENS) * bytes_per_token
        piece = bisect_left(prompt.sketch_ends, round(end))
        is_known = piece < len(prompt.sketch)
        names.append((number, prompt.sketch[piece]) if is_known else (id(entry), number))
    return names
