"""The model's computation: prefill a chunk, decode a batch. No policy, no text, no files.

While the device computes a step, the host builds the graph of the next one (`prepare`), whose input
tokens are still on the device. That step is launched only when the device is done: if it were
launched earlier, MLX would find each cache in use, and copy all of it instead of writing one row.
Text is delivered while a step runs. One extra step after a turn's last token puts that token into
the cache.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, cast

import mlx.core as mx

from fabric.errors import FabricError
from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.turn.generation import Sampling
from node.grammar.answer_matcher import AnswerMatcher
from node.grammar.compiler import Mask, full_mask, mask_of, only_token
from node.limits import PREFIX_COPIES, SCORES_COPIES
from node.mlx import attention, backend, device, recurrent_layer
from node.mlx.batch_layers import WASTE_MAX, GroupedLayer, PaddedLayer, RaggedLayer, padded_groups
from node.mlx.device import DeviceError, device_errors, refuse_nan, watch_nan
from node.mlx.model_limits import ModelLimits, read_limits
from node.mlx.opaque_cache import OpaqueCache
from node.mlx.recurrent_layer import RecurrentLayer
from node.mlx.resident_cache import CacheMark, ResidentCache, arrange_layers
from node.mlx.sampling import Likeliest, Sampler, Top, make_sampler, score_tokens, unpack_mask
from node.mlx.thought_budget import Steering, ThoughtBudget

Logits: TypeAlias = mx.array  # of a chunk's tokens, perhaps not computed yet
Sampled: TypeAlias = tuple[mx.array, Likeliest | None]  # token `[1]`, perhaps not computed yet


class Batching(StrEnum):
    """Layout of a decode batch; the probe finds one that the model's attention supports."""

    RAGGED = "ragged"
    PADDED = "padded"
    GROUPED = "grouped"  # padded, for attention with an axis for the query heads of one key head
    ALONE = "alone"


_BATCH_LAYERS = {
    Batching.RAGGED: RaggedLayer,
    Batching.PADDED: PaddedLayer,
    Batching.GROUPED: GroupedLayer,
}


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token; `top` holds (token, logprob), the chosen one first."""

    token: int
    top: Top = ()


@dataclass(slots=True)
class DecodeSlot:
    """One decoding sequence: its cache and the token to feed next."""

    cache: ResidentCache
    sampler: Sampler
    pending: mx.array  # `[1]`, perhaps not computed yet
    pending_logprobs: Likeliest | None = None
    pending_is_sampled: bool = False  # False: the prompt's last token, known to the host
    pending_is_read: bool = False
    pending_is_matched: bool = False
    matcher: AnswerMatcher | None = None  # for an answer with an output format
    budget: ThoughtBudget | None = None  # for its thoughts
    keeps_marks: bool = False
    _mark: CacheMark | None = None  # as of the last step's start

    def take(self, token: mx.array, logprobs: Likeliest | None) -> None:
        """Feed a token next that was just sampled."""
        self.pending, self.pending_logprobs = token, logprobs
        self.pending_is_sampled, self.pending_is_read = True, False
        self.pending_is_matched = False

    def take_up(self, sampled_count: int) -> None:
        """Count the pending token as sampled on another node, the last of `sampled_count`."""
        self.pending_is_sampled = True
        self.sampler.sampled_count = sampled_count

    def note(self, mark: CacheMark) -> None:
        """Keep the cache's mark before the next step, if marks are kept."""
        self._mark = mark if self.keeps_marks else None

    @property
    def mark_before_read(self) -> CacheMark | None:
        """Mark of the cache before the token that was read last, if marks are kept."""
        if not self.keeps_marks:
            return None
        return self.cache.mark() if self.pending_is_read else self._mark

    def match(self) -> None:
        """Pass the pending token to the matcher and the budget, once; may wait for it."""
        is_free = self.matcher is None and self.budget is None
        if is_free or not self.pending_is_sampled or self.pending_is_matched:
            return
        token = int(self.pending.item())
        if self.matcher is not None:
            with _format_errors():
                self.matcher.take(token)
        self.pending_is_matched = True
        if self.budget is not None:
            self.budget.take(token)

    def mask(self) -> Mask:
        """Wait for the mask of the next token and return it."""
        assert self.matcher is not None, "only formats have masks"
        with _format_errors():
            return self.matcher.mask()


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is not launched yet: its logits, and marks of its caches before it."""

    slots: tuple[DecodeSlot, ...]
    logits: mx.array
    marks: tuple[CacheMark, ...]

    def undo(self) -> None:
        """Restore the caches to their state before the step."""
        _undo(self.slots, self.marks)


def _undo(slots: Sequence[DecodeSlot], marks: Sequence[CacheMark]) -> None:
    for slot, mark in zip(slots, marks, strict=True):
        slot.cache.undo(mark)


@contextmanager
def _format_errors() -> Iterator[None]:
    """Convert errors of the grammar library to errors of one answer."""
    try:
        yield
    except RuntimeError as error:
        message = f"the output format cannot be followed ({type(error).__name__})"
        raise FabricError(message, code="format_failed") from error


class Engine:
    """The model's computation; every method runs on the engine thread."""

    def __init__(
        self,
        model: Any,
        spec: ModelCacheSpec | None,
        *,
        packed: bool = True,
        limits: ModelLimits | None = None,
    ) -> None:
        self.model = model
        self.limits = limits or read_limits(model)
        self.is_opaque = spec is None  # such caches cannot be cut or stored
        self.spec = spec or ModelCacheSpec(())
        self.packed = packed
        self.batching = Batching.ALONE if self.is_opaque else Batching.RAGGED
        attention.install()
        here = backend.current()
        self.chunk_tokens_max = here.chunk_tokens_max
        self.padded_tokens_max = here.padded_tokens_max
        self.padded_waste_max: float = WASTE_MAX  # 1.0: only sequences of equal length together
        self.pair_bytes = 0  # bytes of the scores of one query token and one key token
        self.prefill_bytes_max = sys.maxsize  # limit of one chunk: scores, and the unpacked prefix
        self.array_bytes_min = 0  # counted for each array of a cache
        self.launch_waits = here.launch_waits
        # Per step launched since the last check: whether its logits contain a NaN.
        self._unsound: list[mx.array] = []

    def check(self) -> None:
        """Wait for all launched work; raise DeviceError if any of it failed."""
        device.synchronize()
        with device_errors():
            refuse_nan(self._unsound, "a step")
        self._unsound.clear()

    def return_unused(self) -> None:
        """Return the memory of freed arrays to the system; raise DeviceError as `check`."""
        device.return_unused()

    def recover(self) -> None:
        """Discard failed work; raise DeviceError if the device can no longer compute."""
        self._unsound.clear()
        device.clear()

    @property
    def prefix_bytes(self) -> int:
        """Bytes per token of a prefix that prefill unpacks at a time."""
        return PREFIX_COPIES * max((layer.plain_bytes for layer in self.spec.layers), default=0)

    def pairs_max(self, position: int) -> int:
        """Return how many pairs of a query token and a key token a chunk at `position` may have."""
        if not self.pair_bytes:
            return sys.maxsize
        free_bytes = max(0, self.prefill_bytes_max - position * self.prefix_bytes)
        return free_bytes // (self.pair_bytes * SCORES_COPIES)

    def new_cache(self, capacity_tokens: int) -> ResidentCache:
        if self.is_opaque:
            return cast("ResidentCache", OpaqueCache(self.model))
        cache = ResidentCache(self.spec, capacity_tokens, packed=self.packed)
        cache.array_bytes_min = self.array_bytes_min
        return cache

    def prefill(self, cache: ResidentCache, tokens: list[int]) -> Logits:
        """Compute the cache of `tokens`; return their logits, not evaluated yet.

        On failure the cache is as before. Raise RejectedError for unknown or too many tokens, and
        DeviceError for errors of the device, perhaps of an earlier step.
        """
        with device_errors():
            return self._extend(cache, tokens)

    def score(
        self, cache: ResidentCache, tokens: list[int], following: list[int], alternatives: int
    ) -> list[Top]:
        """Compute like `prefill`; return the log probabilities of each token's successor."""
        with device_errors():
            logits = self._extend(cache, tokens)[0, :, : self.limits.vocabulary_size]
            return score_tokens(logits, following, alternatives)

    def _extend(self, cache: ResidentCache, tokens: list[int]) -> mx.array:
        """Append tokens; return their logits, not evaluated yet."""
        end = cache.tokens_count + len(tokens)
        assert not cache.ahead or end <= cache.ahead[0][0], "no step overwrites rows that are held"
        self.limits.check_tokens(tokens)
        self.limits.check_positions(end)
        cache.leave_batch()
        mark = cache.mark()
        try:
            with watch_nan(cache.leaves) as found_nan:
                logits: mx.array = self.model(mx.array([tokens], mx.uint32), cache=cache.layers)
            mx.async_eval(found_nan)
            cache.settle()
            refuse_nan(found_nan, "a prompt")
        except BaseException:
            cache.undo(mark)
            raise
        cache.advance(len(tokens))
        cache.slide()
        return logits

    def start(
        self, cache: ResidentCache, prompt: list[int], sampling: Sampling, seed: int
    ) -> DecodeSlot:
        """Create a slot that feeds the prompt's last token; the cache holds all others.

        If it holds all of them, `sample_first` must follow. Raise RejectedError if prompt or
        sampling name unknown tokens.
        """
        assert cache.tokens_count >= len(prompt) - 1, "all but the last token are prefilled"
        assert not cache.ahead, "no rows are held after the prompt"
        self.limits.check_tokens(prompt)
        sampler = make_sampler(sampling, seed, prompt, self.limits.vocabulary_size)
        return DecodeSlot(cache, sampler, mx.array(prompt[-1:], mx.uint32))

    def sample_first(self, slot: DecodeSlot, logits: Logits) -> None:
        """Sample the answer's first token from the logits of the chunk that ended the prompt.

        It saves a step, and so one pass over the model's weights.
        """
        with device_errors():
            last = logits[:, -1, : self.limits.vocabulary_size]
            self._compute([slot], *self._sample([slot], last), [])

    def prepare(self, slots: list[DecodeSlot]) -> PreparedStep:
        """Build the step that feeds every slot's pending token; nothing is computed yet.

        The caches must not change before it is launched or undone.
        """
        caches = [slot.cache for slot in slots]
        with device_errors():
            for cache in caches:
                cache.make_room()
            marks = tuple(cache.mark() for cache in caches)
            try:
                logits = self._forward(caches, [slot.pending for slot in slots])
            except BaseException:
                _undo(slots, marks)
                raise
        return PreparedStep(tuple(slots), logits, marks)

    def launch(self, step: PreparedStep) -> None:
        """Feed the pending tokens of a step's slots and start computing the next ones.

        A step that fails is undone. Raise DeviceError for errors of the device, perhaps of an
        earlier step.
        """
        slots = step.slots
        samplers = [slot.sampler.mark() for slot in slots]
        with device_errors():
            try:
                sampled, unsound = self._sample(slots, step.logits)
            except BaseException:
                step.undo()
                for slot, chosen in zip(slots, samplers, strict=True):
                    slot.sampler.undo(chosen)
                raise
            for slot, mark in zip(slots, step.marks, strict=True):
                slot.note(mark)
                slot.cache.advance(1)
            self._compute(slots, sampled, unsound, [slot.cache.step_outputs() for slot in slots])

    def _compute(
        self,
        slots: Sequence[DecodeSlot],
        sampled: Sequence[Sampled],
        unsound: mx.array,
        outputs: list[list[mx.array]],
    ) -> None:
        """Start to compute the sampled tokens, and the `outputs` of the step before them."""
        for slot, (token, logprobs) in zip(slots, sampled, strict=True):
            slot.take(token, logprobs)
        tops = [slot.pending_logprobs.arrays() for slot in slots if slot.pending_logprobs]
        self._unsound.append(unsound)
        mx.async_eval([slot.pending for slot in slots], tops, outputs, unsound)

    def _sample(
        self, slots: Sequence[DecodeSlot], logits: mx.array
    ) -> tuple[list[Sampled], mx.array]:
        """Return the next tokens, and whether their logits contain NaN."""
        if not self.launch_waits and any(slot.matcher or slot.budget for slot in slots):
            mx.async_eval(logits)  # while the matchers compute their masks
        for slot in slots:
            slot.match()
        return _sampled_of(slots, logits), mx.isnan(mx.max(logits))

    def feed(self, caches: list[ResidentCache], tokens: list[mx.array]) -> mx.array:
        """Append one token `[1]` to each cache; return logits `[caches, vocabulary]`."""
        for cache in caches:
            cache.make_room()
        logits = self._forward(caches, tokens)
        for cache in caches:
            cache.advance(1)
        mx.async_eval(logits, [cache.step_outputs() for cache in caches])
        return logits

    def _forward(self, caches: list[ResidentCache], tokens: list[mx.array]) -> mx.array:
        for cache in caches:
            self.limits.check_positions(cache.tokens_count + 1)
        if len(caches) == 1:
            caches[0].leave_batch()
            return self._logits(tokens[0][None], caches[0].layers)
        if self.batching is Batching.RAGGED:
            return self._forward_together(caches, tokens)
        groups = [[index] for index in range(len(caches))]
        if self.batching is not Batching.ALONE:
            lengths = [cache.tokens_count for cache in caches]
            groups = padded_groups(
                lengths, waste_max=self.padded_waste_max, tokens_max=self.padded_tokens_max
            )
        rows: dict[int, mx.array] = {}
        for group in groups:
            picked = [caches[i] for i in group], [tokens[i] for i in group]
            forward = self._forward if len(group) == 1 else self._forward_together
            logits = forward(*picked)
            rows |= {index: logits[at : at + 1] for at, index in enumerate(group)}
        return mx.concatenate([rows[index] for index in range(len(caches))])

    def _forward_together(self, caches: list[ResidentCache], tokens: list[mx.array]) -> mx.array:
        offsets = mx.array([cache.tokens_count for cache in caches])
        views = [
            self._together([cache.leaves[leaf] for cache in caches], offsets)
            for leaf in range(len(self.spec.layers))
        ]
        together = mx.concatenate(tokens)[:, None]
        return self._logits(together, arrange_layers(self.spec, views))

    def _logits(self, tokens: mx.array, layers: list[Any]) -> mx.array:
        """Return `[batch, vocabulary]`, without logits of tokens that cannot be fed again."""
        logits: mx.array = self.model(tokens, cache=layers)
        return logits[:, -1, : self.limits.vocabulary_size]

    def _together(self, leaves: list[Any], offsets: mx.array) -> Any:
        if isinstance(leaves[0], RecurrentLayer):
            return recurrent_layer.stack(leaves)
        return _BATCH_LAYERS[self.batching](leaves, offsets)

    def peek(self, slot: DecodeSlot) -> SampledToken | None:
        """Wait for and return the sampled token that is not fed yet, if there is one."""
        if not slot.pending_is_sampled:
            return None
        return self._sampled_token(slot.pending, slot.pending_logprobs)

    def _sampled_token(self, token: mx.array, logprobs: Likeliest | None) -> SampledToken:
        with device_errors():
            chosen = int(token.item())
            if chosen >= self.limits.vocabulary_size:
                message = f"a step sampled token {chosen}, which the model does not have"
                raise DeviceError(message)
            return SampledToken(chosen, logprobs.read([chosen])[0] if logprobs else ())

    def read(self, slot: DecodeSlot) -> SampledToken | None:
        """Wait for and return the next token to feed, unless it was read before."""
        sampled = None if slot.pending_is_read else self.peek(slot)
        slot.pending_is_read = slot.pending_is_read or sampled is not None
        return sampled


def _sampled_of(slots: Sequence[DecodeSlot], logits: mx.array) -> list[Sampled]:
    best = mx.argmax(logits, axis=-1).astype(mx.uint32)
    return [_sample_token(slot, logits[i : i + 1], best[i : i + 1]) for i, slot in enumerate(slots)]


def _sample_token(slot: DecodeSlot, logits: mx.array, best: mx.array) -> Sampled:
    """Sample one sequence's token; `best` is the likeliest, not evaluated unless used."""
    steering = slot.budget.steering if slot.budget is not None else None
    if slot.matcher is None and steering is None:
        return (best, None) if slot.sampler.is_plain_greedy else slot.sampler.sample(logits)
    size = logits.shape[-1]
    mask, openings = full_mask(size), tuple[int, ...]()
    if slot.matcher is not None:
        mask, openings = slot.mask(), slot.matcher.openings
    if steering is not None:
        mask, openings = _steer_mask(mask, openings, steering, size)
        if not steering.bars and (forced := only_token(mask)) is not None:
            return slot.sampler.force(logits, forced)
    return slot.sampler.sample(logits, unpack_mask(mask, size), openings)


def _steer_mask(
    mask: Mask, openings: tuple[int, ...], steering: Steering, size: int
) -> tuple[Mask, tuple[int, ...]]:
    """Return the tokens that format and budget allow; where there are none, the format's."""
    steered = mask_of((token for token in steering.ids if token < size), len(mask))
    if steering.bars:
        left = tuple(token for token in openings if token not in steering.ids)
        barred = mask & ~steered
        return (barred, left) if barred.any() else (mask, openings)
    wanted = steered & (mask | mask_of(openings, len(mask)))
    return (wanted, ()) if wanted.any() else (mask, openings)
