"""One turn inside the engine: a prompt being prefilled, then an answer being decoded."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from fabric.errors import FabricError
from fabric.turn.generation import FinishReason, Priority, Resumption, Sampling, TokenLogprob
from node.dialect.answer_delta import AnswerDelta
from node.engine.memory_budget import Reservation
from node.engine.trimmed_end import TrimmedEnd
from node.grammar.answer_matcher import AnswerMatcher
from node.mlx.answer import Answer
from node.mlx.engine import DecodeSlot, SampledToken
from node.mlx.resident_cache import CacheMark, ResidentCache


@dataclass(frozen=True, slots=True)
class Granted:
    """The sequence has its memory: the cached prefix may be loaded."""


@dataclass(frozen=True, slots=True)
class Computed:
    """So many of the prompt's tokens are in the cache, and more are to come."""

    tokens_count: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the cache; decoding begins."""


@dataclass(frozen=True, slots=True)
class Produced:
    """Tokens up to number `index` exist; `shown` is what the client may see of them."""

    index: int
    shown: AnswerDelta
    logprobs: tuple[TokenLogprob, ...]
    was_delivered: bool = False  # where it was sampled: the client has read it


@dataclass(frozen=True, slots=True)
class Ended:
    """No more tokens; the cache holds the prompt's tokens fed so far and the answer's."""

    reason: FinishReason | None  # None: cancelled
    shown: AnswerDelta
    answer_ids: list[int]
    answer_text: str
    answer_ends: list[int]
    stop_string: str | None
    is_handover: bool = False  # it goes on elsewhere: `sampled` is its next token, if it had any
    sampled: SampledToken | None = None
    sampled_shown: AnswerDelta | None = None  # what the client may see of that token
    is_preempted: bool = False  # its memory is wanted: once saved, it is not kept


@dataclass(frozen=True, slots=True)
class Broke:
    """The sequence failed; its cache is not to be trusted."""

    error: FabricError


@dataclass(slots=True)
class PromptEcho:
    """A prompt that is told again; `scored` is filled from its second token on, if wanted."""

    text: str
    scored: list[TokenLogprob] | None = None


SequenceEvent = Granted | Computed | Started | Produced | Ended | Broke


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Sequence:
    """Work for the engine thread; every callable in it must be safe to call from there.

    `reserve_bytes`: what its cache will need for prompt and answer; it waits until they fit.
    `room_tokens`: for so many that suffices; `grown_bytes` says what more of them take.
    `is_preemptible`: while true and memory is short, it may be handed over to be resumed later.
    `granted`: called whenever that memory is granted, before anything is computed.
    `awaited_tokens`: so many of the prompt that the cache is about to hold; until it does,
    when this is set to None, the prompt is passed over.
    `is_blocked`: while true, a prompt is passed over (too much of it waits to be saved).
    `stops`: ascending positions in tokens at which a prefill chunk must end.
    `reached`: called after each prefill chunk with the tokens in the cache.
    `matcher`: follows an answer whose format is prescribed; it has taken `answer_ids`.
    `resumed`: the answer's beginning, made elsewhere; the prompt ends with the token sampled there.
    `was_admitted`: its client was told that it waits, or read a part of it: it is not refused.
    `trimmed`: follows the answer where a state is to be kept in front of its last white space.
    `echo`: the prompt, where it is to be told before the answer.
    `yielding`: set to end it between two tokens so that another node can go on.
    `owns_reservation`: whoever submitted it releases `reservation`, once its cache is counted
    among the idle ones or gone; otherwise that happens at the end of the sequence.
    """

    cache: ResidentCache
    prompt: list[int]
    sampling: Sampling
    seed: int
    answer: Answer
    emit: Callable[[SequenceEvent], None]
    stop_ids: frozenset[int]
    token_text: Callable[[int], str]
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    reserve_bytes: int = 0
    room_tokens: int = sys.maxsize
    grown_bytes: Callable[[int], int] | None = None
    is_preemptible: Callable[[], bool] = _never
    granted: Callable[[], None] | None = None
    awaited_tokens: int | None = None
    is_blocked: Callable[[], bool] = _never
    stops: tuple[int, ...] = ()
    reached: Callable[[int], None] | None = None
    owns_reservation: bool = False
    matcher: AnswerMatcher | None = None
    resumed: Resumption | None = None
    was_admitted: bool = False
    trimmed: TrimmedEnd | None = None
    echo: PromptEcho | None = None
    cancelled: Event = field(default_factory=Event)
    yielding: Event = field(default_factory=Event)
    slot: DecodeSlot | None = None
    answer_ids: list[int] = field(default_factory=list)
    # What the scheduler keeps about it.
    reservation: Reservation | None = None
    order: int = 0  # of arrival
    started_s: float | None = None  # when it first had its memory
    served_s: float = 0.0  # when it last got anything done, or arrived
    served_order: int = 0  # of its last prefill chunk among all chunks
    passed_count: int = 0  # smaller ones that overtook it while it waited for memory
    is_promoted: bool = False  # background that waited too long
    is_preempted: bool = False  # it gives its memory back

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to compute before decoding; the last one is decoded."""
        held = self.awaited_tokens
        if held is None:
            held = self.cache.tokens_count + self.cache.ahead_tokens
        return len(self.prompt) - 1 - held

    @property
    def chunk_left(self) -> int:
        """Prompt tokens to compute before the next ones that the cache holds already."""
        cache, left = self.cache, self.prefill_left
        return min(left, cache.ahead[0][0] - cache.tokens_count) if cache.ahead else left

    @property
    def scored(self) -> list[TokenLogprob] | None:
        """The prompt's log probabilities so far; None where they are not wanted."""
        return self.echo.scored if self.echo is not None else None

    @property
    def mark_before_read(self) -> CacheMark | None:
        """What its cache was in front of the token that was read last, where that is noted."""
        return self.slot.mark_before_read if self.slot is not None else None

    @property
    def is_resumed(self) -> bool:
        """Say whether it goes on with an answer that was begun elsewhere."""
        return self.resumed is not None

    @property
    def can_yield(self) -> bool:
        """Say whether it can stop here: an answer that is taken up is first brought back whole."""
        return self.resumed is None or self.slot is not None

    @property
    def is_urgent(self) -> bool:
        return self.is_promoted or self.priority is Priority.INTERACTIVE

    @property
    def needs_bytes(self) -> int:
        """Memory that it still has to be granted before it may run."""
        held_bytes = self.reservation.size_bytes if self.reservation is not None else 0
        return max(0, self.reserve_bytes - held_bytes)
