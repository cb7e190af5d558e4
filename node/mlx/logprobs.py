"""Log probabilities of the chosen token and the likeliest ones.

They are computed in the same graph as their token, so reading them costs no further computation.
"""

from typing import Final, NamedTuple

import mlx.core as mx

LOGPROB_MIN: Final = -9_999.0  # JSON has no infinity; OpenAI's API uses this value
Top = tuple[tuple[int, float], ...]  # tokens and log probabilities, the chosen one first


class Likeliest(NamedTuple):
    """Per row of logits, not computed yet: the chosen token's logprob, and the likeliest tokens."""

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


def scored(logits: mx.array, following: list[int], alternatives_count: int) -> list[Top]:
    """Return likewise for rows of logits; a row's chosen token is its successor."""
    exact = logits.astype(mx.float32)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    return likeliest(exact, mx.array(following), alternatives_count).read(following)
