"""Sampling of tokens, and log probabilities of the chosen and the likeliest ones.

Greedy sequences are sampled in one batched call, the others one by one. mlx-lm's samplers use a
global generator, so results would depend on the batch. Here the key of token n is a hash of
(seed, n), which is reproducible alone and in any batch.

Log probabilities are computed in the same graph as their token, so they cost no extra step.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors
from xxhash import xxh3_64

from fabric.errors import RejectedError
from fabric.turn.generation import Sampling
from node.grammar.compiler import Mask
from node.limits import PENALTY_TOKENS_MAX

LOGPROB_MIN: Final = -9_999.0  # JSON has no infinity; OpenAI's API uses this value
Top = tuple[tuple[int, float], ...]  # tokens and log probabilities, the chosen one first


class Likeliest(NamedTuple):
    """Unevaluated arrays, by row of logits: the chosen token's logprob and the likeliest tokens."""

    chosen: mx.array  # `[rows, 1]`
    tokens: mx.array | None  # `[rows, alternatives]` in any order; None: not requested
    logprobs: mx.array | None  # `[rows, alternatives]`

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate."""
        return [array for array in self if array is not None]

    def read(self, chosen: list[int]) -> list[Top]:
        """Wait for the numbers; return them with each row's chosen token.

        Equally likely tokens are in the order of their ids.
        """
        own = zip(chosen, self.chosen.tolist(), strict=True)
        if self.tokens is None or self.logprobs is None:
            return [((token, logprob),) for token, (logprob,) in own]
        others = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        return [
            ((token, logprob), *sorted(zip(*row, strict=True), key=lambda each: (-each[1], each)))
            for (token, (logprob,)), row in zip(own, others, strict=True)
        ]


def likeliest(logprobs: mx.array, chosen: mx.array, alternatives_count: int) -> Likeliest:
    """Select the `chosen` `[rows]` and the likeliest tokens of `[rows, vocabulary]`."""
    # Masked tokens, and NaN, are shown as nearly impossible.
    finite = mx.where(mx.isfinite(logprobs), logprobs, LOGPROB_MIN)
    own = mx.take_along_axis(finite, chosen[:, None], axis=-1)
    if not alternatives_count:
        return Likeliest(own, None, None)
    count = min(alternatives_count, finite.shape[-1])
    tokens = mx.argpartition(-finite, kth=count - 1, axis=-1)[:, :count]
    return Likeliest(own, tokens, mx.take_along_axis(finite, tokens, axis=-1))


def score_tokens(logits: mx.array, following: list[int], alternatives_count: int) -> list[Top]:
    """Return the log probabilities of a prompt's tokens, each computed by the row before it."""
    exact = logits.astype(mx.float32)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    return likeliest(exact, mx.array(following), alternatives_count).read(following)


_PENALTY_CONTEXT_TOKENS = 1_024


@dataclass(slots=True)
class Sampler:
    """Sampler of one sequence."""

    sampling: Sampling
    seed: int
    processors: list[Any]
    history: mx.array | None  # kept only if a penalty reads it
    sampled_count: int = 0

    @property
    def is_plain_greedy(self) -> bool:
        """Return whether a batched argmax suffices."""
        s = self.sampling
        return s.temperature == 0 and not self.processors and s.logprobs is None

    def mark(self) -> tuple[int, mx.array | None]:
        """Mark the tokens sampled so far."""
        return self.sampled_count, self.history

    def undo(self, mark: tuple[int, mx.array | None]) -> None:
        """Forget the tokens sampled since a mark, after a failed step."""
        self.sampled_count, self.history = mark

    def sample(
        self, logits: mx.array, allowed: mx.array | None = None, openings: tuple[int, ...] = ()
    ) -> tuple[mx.array, Likeliest | None]:
        """Pick from `[1, vocab]`; return the token `[1]` and log probabilities if wanted.

        The probabilities are the model's own: a token that is not allowed is never sampled, but no
        less probable. A token of `openings` is taken if it would be sampled without the mask.
        """
        logprobs = self._logprobs(logits)
        token = self._sample(logprobs if allowed is None else self._restrict_to(allowed, logprobs))
        if openings:
            free = self._sample(logprobs)
            opens = mx.any(free == mx.array(openings), keepdims=True)
            token = mx.where(opens, free, token)
        return self._take_token(token, logprobs)

    def force(self, logits: mx.array, token: int) -> tuple[mx.array, Likeliest | None]:
        """Take a token, however probable; its log probability is the model's own."""
        return self._take_token(mx.array([token], mx.uint32), self._logprobs(logits))

    def _logprobs(self, logits: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(self.history, logits)
        if self.is_plain_greedy:  # needs no probabilities
            return logits
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def _take_token(self, token: mx.array, logprobs: mx.array) -> tuple[mx.array, Likeliest | None]:
        self.sampled_count += 1
        if self.history is not None:
            self.history = mx.concatenate([self.history, token])[-PENALTY_TOKENS_MAX:]
        alternatives_count = self.sampling.logprobs
        if alternatives_count is None:
            return token, None
        return token, likeliest(logprobs, token, alternatives_count)

    def _restrict_to(self, allowed: mx.array, logprobs: mx.array) -> mx.array:
        """Renormalize over allowed tokens, before top_p and the like apply."""
        masked = mx.where(allowed, logprobs, -mx.inf)
        if self.sampling.temperature == 0:
            return masked
        return masked - mx.logsumexp(masked, axis=-1, keepdims=True)

    def _sample(self, logprobs: mx.array) -> mx.array:
        s = self.sampling
        if s.temperature == 0:
            return mx.argmax(logprobs, axis=-1).astype(mx.uint32)
        if 0 < s.top_p < 1:
            logprobs = apply_top_p(logprobs, s.top_p)
        if s.min_p > 0:
            logprobs = apply_min_p(logprobs, s.min_p)
        if 0 < s.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, s.top_k)
        key = mx.random.key(_fold(self.seed, self.sampled_count))
        return mx.random.categorical(logprobs / s.temperature, key=key).astype(mx.uint32)


def unpack_mask(mask: Mask, vocabulary_size: int) -> mx.array:
    """Unpack a mask's bits to booleans `[1, vocab]`."""
    bits = (mx.array(mask)[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.reshape(1, -1)[:, :vocabulary_size].astype(mx.bool_)


def _fold(seed: int, index: int) -> int:
    return xxh3_64(f"{seed}:{index}".encode()).intdigest()


def make_sampler(sampling: Sampling, seed: int, prompt: list[int], vocabulary_size: int) -> Sampler:
    """Create one sequence's sampler; penalties apply to the prompt's last tokens, too.

    Raise RejectedError for tokens without a logit: MLX would write out of bounds.
    """
    biases = {int(token): bias for token, bias in sampling.logit_bias.items()}
    if any(not 0 <= token < vocabulary_size for token in biases):
        message = f"logit_bias names a token that is not one of the model's {vocabulary_size}"
        raise RejectedError(message, code="token_out_of_range", param="logit_bias")
    recent = prompt[-PENALTY_TOKENS_MAX:]
    if any(not 0 <= token < vocabulary_size for token in recent):
        message = f"the prompt has a token that is not one of the model's {vocabulary_size}"
        raise RejectedError(message, code="token_out_of_range")
    processors = make_logits_processors(
        biases or None,
        sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None,
        _PENALTY_CONTEXT_TOKENS,
        sampling.presence_penalty or None,
        _PENALTY_CONTEXT_TOKENS,
        sampling.frequency_penalty or None,
        _PENALTY_CONTEXT_TOKENS,
    )
    history = mx.array(recent, mx.uint32) if processors else None
    return Sampler(sampling, seed, processors, history)
