"""One turn inside the engine: a prompt being prefilled, then an answer being decoded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from fabric.errors import FabricError
from fabric.generation import FinishReason, Sampling, TokenLogprob
from node.mlx.answer import Answer, Shown
from node.mlx.engine import DecodeSlot
from node.mlx.resident_cache import ResidentCache


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the cache; decoding begins."""


@dataclass(frozen=True, slots=True)
class Produced:
    """Tokens up to number `index` exist; `shown` is what the client may see of them."""

    index: int
    shown: Shown
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """No more tokens; the cache holds the prompt's tokens fed so far and the answer's."""

    reason: FinishReason | None  # None: cancelled
    shown: Shown
    answer_ids: list[int]
    answer_text: str
    answer_ends: list[int]
    stop_string: str | None


@dataclass(frozen=True, slots=True)
class Broke:
    """The sequence failed; its cache is not to be trusted."""

    error: FabricError


SequenceEvent = Started | Produced | Ended | Broke


@dataclass(slots=True, eq=False)
class Sequence:
    """Work for the engine thread; `emit` must be safe to call from it."""

    cache: ResidentCache
    prompt: list[int]
    sampling: Sampling
    seed: int
    answer: Answer
    emit: Callable[[SequenceEvent], None]
    stop_ids: frozenset[int]
    token_text: Callable[[int], str]
    cancelled: Event = field(default_factory=Event)
    slot: DecodeSlot | None = None
    answer_ids: list[int] = field(default_factory=list)

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to compute before decoding; the last one is decoded."""
        return len(self.prompt) - 1 - self.cache.tokens_count
