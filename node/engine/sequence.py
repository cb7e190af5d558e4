"""One turn inside the engine: a prompt being prefilled, then an answer being decoded."""

import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import ParamSpec, TypeAlias, TypeVar

from fabric.errors import FabricError
from fabric.ids import BlockHash
from fabric.limits import BLOCK_TOKENS
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import FinishReason, Priority, Resumption, Sampling, TokenLogprob
from node.dialect.answer_delta import AnswerDelta
from node.engine.memory_budget import Reservation
from node.grammar.answer_matcher import AnswerMatcher
from node.limits import FIRST_TOKEN_CHUNK_TOKENS_MAX
from node.mlx.answer import Answer
from node.mlx.engine import DecodeSlot, SampledToken
from node.mlx.resident_cache import CacheMark, ResidentCache
from node.mlx.thought_budget import ThoughtBudget


@dataclass(frozen=True, slots=True)
class Granted:
    """The sequence has its memory: the cached prefix may be loaded."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Event after a prefill chunk: the number of prompt tokens in the cache."""

    tokens_count: int


@dataclass(frozen=True, slots=True)
class Awaited:
    """Another sequence waits for more of the head that this one computes."""


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the cache; decoding begins."""


@dataclass(frozen=True, slots=True)
class Produced:
    """Token number `index` exists; `shown` is what it adds for the client."""

    index: int
    shown: AnswerDelta
    logprobs: tuple[TokenLogprob, ...]
    was_delivered: bool = False  # by the node that sampled it


@dataclass(frozen=True, slots=True)
class Ended:
    """No more tokens; the cache holds the prompt's tokens fed so far and the answer's."""

    reason: FinishReason | None  # None: cancelled
    shown: AnswerDelta
    answer_ids: list[int]
    answer_text: str
    answer_ends: list[int]
    stop_string: str | None
    is_handover: bool = False  # another node continues, with the token `sampled` if there is one
    sampled: SampledToken | None = None
    sampled_shown: AnswerDelta | None = None  # text that this token adds for the client
    is_preempted: bool = False  # its memory is needed, so the cache is dropped once saved


@dataclass(frozen=True, slots=True)
class Broke:
    """The sequence failed; its cache must not be reused."""

    error: FabricError


@dataclass(slots=True)
class PromptEcho:
    """A prompt to send back; `scored` is filled from its second token on, if requested."""

    text: str
    scored: list[TokenLogprob] | None = None


SequenceEvent = Granted | Computed | Awaited | Started | Produced | Ended | Broke


@dataclass(slots=True, eq=False)
class TrimmedEnd:
    """Finder of an answer's last recurrent state before trailing white space.

    Many templates trim that space, and each writes the end of a call in its own way. The next
    prompt then diverges before the space, where no recurrent state was kept, and a recurrent state
    cannot be cut. `always`: the template trims every answer, not only those with calls.
    """

    always: bool
    least_tokens: int  # a state at or before this token is too near another one to keep
    _mark: CacheMark | None = None

    def follow(self, text: str, before: CacheMark | None) -> None:
        """Note the next token's text, and the cache's mark before it."""
        if text.strip() and not text[-1].isspace():
            self._mark = None
        elif text.strip() or self._mark is None:
            self._mark = before

    def mark(self, *, has_calls: bool) -> CacheMark | None:
        """Return the mark before the trailing white space, or None if it is not worth keeping."""
        mark = self._mark if self.always or has_calls else None
        return mark if mark is not None and mark.tokens_count > self.least_tokens else None


P = ParamSpec("P")
T = TypeVar("T")
# Called on the engine thread between two steps; must be quick.
EngineCallback: TypeAlias = Callable[P, T]


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Head:
    """The beginning of a prompt that other prompts of its tenant may share.

    The turn sets its permissions and the published part; the engine thread sets the rest.
    """

    ids: list[int]  # the prompt's tokens but the last
    names: tuple[BlockHash, ...]  # names of its full blocks, under its tenant's salt
    stored_tokens: int = 0  # tokens that the turn found stored
    leads: bool = False  # publishes its blocks when others wait for them
    waits: bool = False  # may wait for blocks that another sequence computes
    has_states: bool = False  # recurrent layers, which resume only where a state was kept
    shares_parts: bool = True  # parts of blocks can be shared
    published_tokens: int = 0
    awaited_tokens: int = 0  # end of the part that another sequence waits for
    computed_tokens: int | None = None  # final number of tokens; None: still computing
    expected_tokens: int = 0  # tokens that its sequence waits for now
    waits_since_s: float | None = None  # start of its first wait
    has_grown: bool = False  # more blocks were published: the turn looks them up again
    coming_tokens: int = 0  # end of the part that another node is sending; 0: none
    _common: "dict[Head, int]" = field(default_factory=dict)

    def common_tokens(self, other: "Head") -> int:
        """Return the length of the common prefix: whole blocks, and a part of the next one."""
        count = self._common.get(other)
        if count is None:
            count = self._common[other] = self._compare(other)
        return count

    def _compare(self, other: "Head") -> int:
        ours, theirs = self.names, other.names
        count = min(len(ours), len(theirs))
        blocks = bisect_left(range(count), 1, key=lambda at: ours[at] != theirs[at])
        start = blocks * BLOCK_TOKENS
        if not (blocks and self.shares_parts):  # without a common block, tenants may differ
            return start
        rows = slice(start, start + BLOCK_TOKENS)
        return start + common_prefix(self.ids[rows], other.ids[rows])


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInput:
    """One turn's request to the engine; it never changes."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    token_text: EngineCallback[[int], str]
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    weight: float = 1.0  # its tenant's share
    resumed: Resumption | None = None  # the answer's beginning; `prompt` ends with its next token
    was_admitted: bool = False  # earlier, by this node or another: exempt from queue limits
    matcher: AnswerMatcher | None = None  # for an output format; has consumed `resumed`
    budget: ThoughtBudget | None = None  # for its thoughts; has consumed `resumed`
    grown_bytes: EngineCallback[[int], int] | None = None  # memory needed for n tokens
    # While true and memory is short, the answer may be handed over to be resumed later.
    is_preemptible: EngineCallback[[], bool] = _never
    # Whether the submitter releases the reservation, once its cache is counted as idle or freed;
    # otherwise that happens at the end of the sequence.
    owns_reservation: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's progress in the engine: its cache, its answer, and the scheduler's notes.

    The engine thread changes it. Other threads may set the two events at any time, and
    `is_blocked`, `stops` and `awaited_tokens` while `awaited_tokens` keeps the prompt waiting.
    """

    input: SequenceInput
    cache: ResidentCache
    answer: Answer
    emit: EngineCallback[[SequenceEvent], None]
    reserve_bytes: int = 0  # memory for prompt and answer; the sequence waits until it is free
    room_tokens: int = sys.maxsize  # tokens that fit in `reserve_bytes`
    granted: EngineCallback[[], None] | None = None  # called whenever that memory is granted
    # Tokens of the prompt that the cache is about to hold: until set to None, the prompt waits.
    awaited_tokens: int | None = None
    is_blocked: EngineCallback[[], bool] = _never  # while true, the prompt waits: too much unsaved
    stops: tuple[int, ...] = ()  # ascending positions at which a prefill chunk must end
    reached: EngineCallback[[int], None] | None = None  # called after each chunk with its end
    trimmed: TrimmedEnd | None = None
    echo: PromptEcho | None = None  # sent before the answer
    head: Head | None = None  # shared with other sequences
    cancelled: Event = field(default_factory=Event)
    yielding: Event = field(default_factory=Event)  # set to end it so that another node continues
    slot: DecodeSlot | None = None
    answer_ids: list[int] = field(default_factory=list)
    # The scheduler's notes.
    reservation: Reservation | None = None
    order: int = 0  # order of arrival
    started_s: float | None = None  # when it first had its memory
    served_s: float = 0.0  # when it last made progress, or arrived
    served_order: int = 0  # number of its last prefill chunk among all chunks
    passed_count: int = 0  # smaller sequences that overtook it while it waited for memory
    is_promoted: bool = False  # a background sequence that waited too long
    is_delayed: bool = False  # by a background prompt's chunk, before its first token
    is_preempted: bool = False  # to give its memory back
    is_awaited: bool = False  # an urgent sequence waits for what it computes

    @property
    def tenant(self) -> str:
        return self.input.tenant

    @property
    def weight(self) -> float:
        return self.input.weight

    @property
    def priority(self) -> Priority:
        return self.input.priority

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to compute before decoding; the last one is decoded."""
        held_tokens = self.awaited_tokens
        if held_tokens is None:
            held_tokens = self.cache.tokens_count + self.cache.ahead_tokens
        return len(self.input.prompt) - 1 - held_tokens

    @property
    def chunk_left(self) -> int:
        """Prompt tokens to compute before the next ones that the cache holds already."""
        cache, left = self.cache, self.prefill_left
        return min(left, cache.ahead[0][0] - cache.tokens_count) if cache.ahead else left

    def can_sample_first(self, count: int) -> bool:
        """Return whether a chunk of `count` tokens may also read the prompt's last token.

        Then the answer's first token is sampled from the chunk. No state is kept in between, and a
        resumed answer has sampled that token already.
        """
        end = self.cache.tokens_count + count
        return (
            end == len(self.input.prompt) - 1
            and count < FIRST_TOKEN_CHUNK_TOKENS_MAX
            and not self.cache.ahead
            and end not in self.stops
            and self.trimmed is None
            and self.scored is None
            and not self.is_resumed
        )

    @property
    def scored(self) -> list[TokenLogprob] | None:
        """The prompt's log probabilities so far; None if they were not requested."""
        return self.echo.scored if self.echo is not None else None

    @property
    def mark_before_read(self) -> CacheMark | None:
        """The cache's mark before the token that was read last, if marks are kept."""
        return self.slot.mark_before_read if self.slot is not None else None

    @property
    def is_resumed(self) -> bool:
        """Whether it continues an answer that was begun elsewhere."""
        return self.input.resumed is not None

    @property
    def can_yield(self) -> bool:
        """Whether it can stop here: a resumed answer must first restore its earlier tokens."""
        return self.input.resumed is None or self.slot is not None

    @property
    def is_urgent(self) -> bool:
        return self.input.priority is Priority.INTERACTIVE or self.is_awaited

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, without those that another sequence computes for it."""
        shared_tokens = self.head.expected_tokens if self.head is not None else 0
        return max(self.prefill_left - shared_tokens, 0)

    @property
    def needs_bytes(self) -> int:
        """Memory that it still needs before it may run."""
        held_bytes = self.reservation.size_bytes if self.reservation is not None else 0
        return max(0, self.reserve_bytes - held_bytes)
