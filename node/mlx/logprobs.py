"""Log probabilities as they are told: of the token that was chosen, and of the likeliest."""

from typing import Final

import mlx.core as mx

LOGPROB_MIN: Final = -9_999.0  # JSON has no infinity; OpenAI's API spells it so
Top = tuple[tuple[int, float], ...]  # tokens and log probabilities, the chosen one first


def top_of(logprobs: mx.array | None, chosen: int, alternatives_count: int | None) -> Top:
    """List the chosen token and the likeliest of `[1, vocab]`; nothing if nobody asked."""
    if logprobs is None or alternatives_count is None:
        return ()
    # What is masked out, or was computed from no numbers, is spelled as nearly impossible.
    row = mx.where(mx.isfinite(logprobs[0]), logprobs[0], LOGPROB_MIN)
    best = [(chosen, float(row[chosen].item()))]
    if alternatives_count:
        order = mx.argsort(-row)[:alternatives_count].tolist()
        best += [(int(token), float(row[token].item())) for token in order]
    return tuple(best)


def scored(logits: mx.array, following: list[int], alternatives_count: int) -> list[Top]:
    """List the same for each row of `[tokens, vocab]`, whose chosen token is the one that follows.

    Two that are equally likely come in their own order.
    """
    exact = logits.astype(mx.float32)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    exact = mx.where(mx.isfinite(exact), exact, LOGPROB_MIN)
    chosen = mx.take_along_axis(exact, mx.array(following)[:, None], axis=-1)
    if not alternatives_count:
        return [((token, each),) for token, (each,) in zip(following, chosen.tolist(), strict=True)]
    count = min(alternatives_count, exact.shape[-1])
    best = mx.argpartition(-exact, kth=count - 1, axis=-1)[:, :count]
    told = mx.take_along_axis(exact, best, axis=-1)
    rows = zip(following, chosen.tolist(), best.tolist(), told.tolist(), strict=True)
    return [
        ((token, own[0]), *sorted(zip(ids, values, strict=True), key=lambda each: (-each[1], each)))
        for token, own, ids, values in rows
    ]
