"""Choose which kept tokens of an edited cache are recomputed, at one budget.

    first      the first ones behind each edit, as by `node.edit_recomputed_tokens` (EPIC)
    deviating  those whose keys and values of the second layer the edit changes most (CacheBlend)
    blocks     the same for whole runs of 16 tokens, by their mean: fewer holes
    oracle     those whose last hidden state the edit changes most, which no engine can know before

Source: CacheBlend (arXiv 2405.16444), 4.3: deviations of the first layers predict later ones.
CacheBlend reduces its choice layer by layer; here it is made once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from fabric.kvcache.arrangement import Move

CHOICES = ("first", "deviating", "blocks", "oracle")
SHARES = (0.05, 0.10, 0.15)
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Deviations:
    """Change of each kept token behind an edit: in the second layer, and at the end."""

    early: np.ndarray
    last: np.ndarray


def deviations(
    model: Any, original_ids: Sequence[int], edited: Sequence[int], moves: Sequence[Move]
) -> Deviations:
    """Compute both prompts and compare the tokens that the edited one keeps behind its head."""
    before, after = _states(model, original_ids), _states(model, edited)
    old, new = old_places(moves), places(moves)
    early, last = (
        np.linalg.norm(b[new] - a[old], axis=-1) for a, b in zip(before, after, strict=True)
    )
    return Deviations(early, last)


def _states(model: Any, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values of the second layer, not turned, and the last hidden states."""
    inner = model.model
    hidden, early = inner.embed_tokens(mx.array([ids])), None
    for number, layer in enumerate(inner.layers):
        if number == 1:
            read = layer.input_layernorm(hidden)
            attention = layer.self_attn
            early = mx.concatenate([attention.k_proj(read), attention.v_proj(read)], axis=-1)
        hidden = layer(hidden, "causal")
    assert early is not None, "the model needs several layers"
    states = early[0].astype(mx.float32), hidden[0].astype(mx.float32)
    mx.eval(states)
    return np.array(states[0]), np.array(states[1])


def places(moves: Sequence[Move]) -> np.ndarray:
    """Return the positions of the tokens kept behind the head in the edited prompt."""
    return np.concatenate([np.arange(move.new_start, move.new_end) for move in moves[1:]])


def old_places(moves: Sequence[Move]) -> np.ndarray:
    """Return their positions in the original prompt."""
    return np.concatenate([np.arange(move.start, move.end) for move in moves[1:]])


def choose_tokens(
    choice: str, share: float, moves: Sequence[Move], differences: Deviations
) -> np.ndarray:
    """Return a mask of the kept tokens behind the head that are recomputed."""
    count = len(differences.early)
    budget = round(share * count)
    picked = np.zeros(count, bool)
    if choice == "first":
        rank = np.concatenate([np.arange(move.end - move.start) for move in moves[1:]])
        picked[np.argsort(rank, kind="stable")[:budget]] = True
        return picked
    if choice != "blocks":
        by = differences.early if choice == "deviating" else differences.last
        picked[np.argsort(-by, kind="stable")[:budget]] = True
        return picked
    blocks = np.arange(0, count, BLOCK_TOKENS)
    means = [differences.early[at : at + BLOCK_TOKENS].mean() for at in blocks]
    for number in np.argsort(-np.array(means), kind="stable"):
        if picked.sum() + BLOCK_TOKENS > budget:
            break
        picked[blocks[number] : blocks[number] + BLOCK_TOKENS] = True
    return picked


def remaining_moves(moves: Sequence[Move], picked: np.ndarray) -> list[Move]:
    """Return the moves without the recomputed tokens."""
    remaining, at = [moves[0]], 0
    for move in moves[1:]:
        is_picked = picked[at : at + move.end - move.start]
        at += len(is_picked)
        edges = np.flatnonzero(np.diff(is_picked, prepend=True, append=True))
        remaining += [
            Move(move.start + first, move.start + last, move.new_start + first)
            for first, last in pairwise(map(int, edges))
            if not is_picked[first]
        ]
    return remaining
