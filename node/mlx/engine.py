"""Run the model: prefill a chunk, decode a batch. No policy, no text, no files.

Decoding is one step ahead: the next step is launched from tokens still on the device before
the host reads them, so reading and detokenizing hide behind computing. The step that turns
out to be one too many is what puts a turn's last token into the cache.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from fabric.cache_spec import ModelCacheSpec
from fabric.generation import Sampling
from fabric.limits import PREFILL_CHUNK_TOKENS_MAX, PREFILL_CHUNK_TOKENS_MIN
from node.mlx import ragged_layer
from node.mlx.ragged_layer import RaggedLayer
from node.mlx.resident_cache import ResidentCache
from node.mlx.sampling import Chooser, make_chooser


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token the model produced; `top` holds (token, logprob), the chosen one first."""

    token: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class DecodeSlot:
    """One decoding sequence: its cache and the token to feed next."""

    cache: ResidentCache
    chooser: Chooser
    pending: mx.array  # `[1]`, perhaps not computed yet
    pending_logprobs: mx.array | None = None
    pending_is_drawn: bool = False  # False: the prompt's last token, known to the host
    unread: list[tuple[mx.array, mx.array | None]] = field(default_factory=list)


class Engine:
    """Owns the model's computation; every method runs on the engine thread."""

    def __init__(self, model: Any, spec: ModelCacheSpec) -> None:
        self._model = model
        self.spec = spec
        self.can_batch = ragged_layer.install(model)
        # Without a fused kernel the masked half of the scores is computed as well: on CPU
        # 2,000 tokens in chunks of 512 took 0.6x the time of one chunk.
        self.chunk_tokens_max = (
            PREFILL_CHUNK_TOKENS_MAX if mx.metal.is_available() else PREFILL_CHUNK_TOKENS_MIN
        )

    def new_cache(self, capacity_tokens: int) -> ResidentCache:
        """Make an empty resident cache with room for `capacity_tokens`."""
        return ResidentCache(self.spec, capacity_tokens)

    def prefill(self, cache: ResidentCache, tokens: list[int]) -> None:
        """Compute the cache of `tokens`; on failure the cache is as before."""
        before = cache.tokens_count
        try:
            self._model(mx.array([tokens], mx.uint32), cache=cache.layers)
            cache.settle()
        except BaseException:
            cache.rewind(before)
            raise

    def start(
        self, cache: ResidentCache, prompt: list[int], sampling: Sampling, seed: int
    ) -> DecodeSlot:
        """Make a slot that feeds the prompt's last token, all others being in the cache."""
        assert cache.tokens_count == len(prompt) - 1, "all but the last token are prefilled"
        chooser = make_chooser(sampling, seed, prompt)
        return DecodeSlot(cache, chooser, mx.array(prompt[-1:], mx.uint32))

    def launch(self, slots: list[DecodeSlot]) -> None:
        """Feed every slot's pending token and start computing the next ones."""
        before = [slot.cache.tokens_count for slot in slots]
        try:
            logits = self._forward(slots)
            drawn = _draw(slots, logits)
        except BaseException:
            for slot, count in zip(slots, before, strict=True):
                slot.cache.rewind(count)
            raise
        for slot, (token, logprobs) in zip(slots, drawn, strict=True):
            if slot.pending_is_drawn:
                slot.unread.append((slot.pending, slot.pending_logprobs))
            slot.pending, slot.pending_logprobs, slot.pending_is_drawn = token, logprobs, True
        mx.async_eval([slot.pending for slot in slots])

    def _forward(self, slots: list[DecodeSlot]) -> mx.array:
        if len(slots) == 1:
            tokens = slots[0].pending[None]
            return self._model(tokens, cache=slots[0].cache.layers)[:, -1, :]
        if not self.can_batch:
            return mx.concatenate([self._forward([slot]) for slot in slots])
        tokens = mx.concatenate([slot.pending for slot in slots])[:, None]
        offsets = mx.array([slot.cache.tokens_count for slot in slots])
        views = [
            RaggedLayer([slot.cache.layers[layer] for slot in slots], offsets)
            for layer in range(len(self.spec.layers))
        ]
        return self._model(tokens, cache=views)[:, -1, :]

    def read(self, slot: DecodeSlot) -> list[Drawn]:
        """Wait for and return the tokens that were fed since the last read."""
        out = []
        for token, logprobs in slot.unread:
            chosen = int(token.item())
            top = _top(logprobs, chosen, slot.chooser.sampling.logprobs)
            out.append(Drawn(chosen, top))
        slot.unread.clear()
        return out


def _draw(slots: list[DecodeSlot], logits: mx.array) -> list[tuple[mx.array, mx.array | None]]:
    if all(slot.chooser.is_plain_greedy for slot in slots):
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        return [(tokens[i : i + 1], None) for i in range(len(slots))]
    return [slot.chooser.choose(logits[i : i + 1]) for i, slot in enumerate(slots)]


def _top(
    logprobs: mx.array | None, chosen: int, rivals_count: int | None
) -> tuple[tuple[int, float], ...]:
    if logprobs is None or rivals_count is None:
        return ()
    row = logprobs[0]
    best = [(chosen, float(row[chosen].item()))]
    if rivals_count:
        order = mx.argsort(-row)[:rivals_count].tolist()
        best += [(int(token), float(row[token].item())) for token in order]
    return tuple(best)
