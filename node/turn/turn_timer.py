"""Timer of one turn on its node: the seconds of each part."""

from enum import StrEnum

from fabric.hosting.tracing import Span
from fabric.ids import NodeName, TurnId
from fabric.ports import Clock
from fabric.record.turn_history import TurnNote
from fabric.turn.generation import Admitted, GenerateRequest, TurnTag, TurnTimes
from node.limits import TURN_SPANS_MAX


class Part(StrEnum):
    """Part of a turn, named as the field of TurnTimes that counts its seconds."""

    QUEUE = "queue_s"
    PREPARE = "prepare_s"
    FETCH = "fetch_s"
    LOAD = "load_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    SAVE = "save_s"


class TurnTimer:
    """Timer of one turn; used on the node's event loop.

    Each call of `spend` counts the time since the one before, so that all of it is counted once.
    """

    def __init__(self, clock: Clock, request: GenerateRequest) -> None:
        """Begin now."""
        self._clock = clock
        now_s = clock.monotonic_s()
        # A router of an earlier version names no turns.
        self._tag = request.turn or TurnTag(TurnId(request.operation), clock.wall_s())
        self._is_tagged = request.turn is not None
        self._began_s = self._last_s = now_s
        self._spent = dict.fromkeys(Part, 0.0)
        self._fetched_until_s = now_s
        self._first_token_s: float | None = None
        self._spans: list[tuple[Part, float, float]] = []  # in order; neighbours differ

    @property
    def tag(self) -> TurnTag:
        """Name of the turn, and its time at the router."""
        return self._tag

    @property
    def id(self) -> TurnId:
        """Name of the turn."""
        return self._tag.id

    def spend(self, part: Part, until_s: float | None = None) -> None:
        """Count the time since the last call, up to now or an earlier moment, as a part's."""
        now_s = self._clock.monotonic_s() if until_s is None else until_s
        spent_s = now_s - self._last_s
        if spent_s <= 0:
            return
        self._spent[part] += spent_s
        if self._spans and self._spans[-1][0] is part:
            self._spans[-1] = (part, self._spans[-1][1], now_s)
        elif len(self._spans) < TURN_SPANS_MAX:
            self._spans.append((part, self._last_s, now_s))
        self._last_s = now_s

    def add_parts(self, span: Span) -> None:
        """Add the parts of the turn to its span."""
        for part, begun_s, ended_s in self._spans:
            span.part(part.value.removesuffix("_s"), begun_s, ended_s)

    def note_fetch_end(self) -> None:
        """Note the end of the fetch from other nodes."""
        self._fetched_until_s = self._clock.monotonic_s()

    def spend_fetching(self) -> None:
        """Count the time from the last call to the end of the fetch."""
        self.spend(Part.FETCH, self._fetched_until_s)

    def note_token(self) -> None:
        """Note a token; the time before the first one counts as prefill."""
        if self._first_token_s is None:
            self.spend(Part.PREFILL)
            here_s = self._last_s - self._began_s
            self._first_token_s = self._tag.queue_s + self._tag.move_s + here_s

    def note_last(self) -> None:
        """Note that no more tokens follow."""
        self.spend(Part.PREFILL if self._first_token_s is None else Part.DECODE)

    @property
    def times(self) -> TurnTimes:
        """Times so far, with those at the router."""
        spent = dict(self._spent)
        spent[Part.QUEUE] += self._tag.queue_s
        by_name = {part.value: seconds for part, seconds in spent.items()}
        return TurnTimes(move_s=self._tag.move_s, first_token_s=self._first_token_s, **by_name)

    @property
    def sent_times(self) -> TurnTimes | None:
        """Times for the router; None if it does not read them."""
        return self.times if self._is_tagged else None

    def note(
        self, node: NodeName, admitted: Admitted, outcome: str, completion_tokens: int
    ) -> TurnNote:
        """Return the turn's entry in the agent's history."""
        self.spend(Part.SAVE)
        return TurnNote(
            self._tag.id,
            self._tag.began_s,
            node,
            outcome,
            admitted.cache.value,
            admitted.match.value,
            admitted.match_reason,
            admitted.prompt_tokens,
            admitted.cached_tokens,
            admitted.fetched_tokens or 0,
            completion_tokens,
            self.times,
        )
