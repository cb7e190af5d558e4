"""Records with absurd texts, token ends, times and counters."""

import math
import random
from collections.abc import Callable
from typing import Any

import msgpack

from fabric.limits import EPOCH_ERASED_MAX, TEXT_SLACK_BYTES, TOKEN_TEXT_BYTES_MAX, WALL_S_MAX
from fabric.record.manifest import Manifest
from tests.fuzz.mutation import spell_msgpack

Tree = dict[str, Any]
_SIZES = (1, TOKEN_TEXT_BYTES_MAX, TOKEN_TEXT_BYTES_MAX + 1, TEXT_SLACK_BYTES, 1 << 20)
_TIMES = (-1.0, -math.inf, math.inf, math.nan, 1e308, WALL_S_MAX, 2 * WALL_S_MAX)
_COUNTS = (0, -1, EPOCH_ERASED_MAX, EPOCH_ERASED_MAX + 1, (1 << 64) - 1)


def rebuilt_bounds(rng: random.Random, body: bytes) -> bytes:
    """Stretch one or two parts of a record that only numeric bounds limit."""
    tree = msgpack.unpackb(body)
    for _ in range(rng.choice((1, 1, 2))):
        tree |= _CHANGES[rng.randrange(len(_CHANGES))](rng, tree)
    return spell_msgpack(rng, tree)


def _with_longer_text(rng: random.Random, tree: Tree) -> Tree:
    return {"text": tree["text"] + rng.choice("A\0é") * rng.choice(_SIZES)}


def _with_long_token(rng: random.Random, tree: Tree) -> Tree:
    size_bytes, ends = rng.choice(_SIZES), tree["token_ends"]
    if not ends:
        return _with_longer_text(rng, tree)
    last = int.from_bytes(ends[-4:], "little") + size_bytes
    ends = ends[:-4] + (last % (1 << 32)).to_bytes(4, "little")
    return {"text": tree["text"] + "A" * size_bytes, "token_ends": ends}


def _with_zero_ends(_rng: random.Random, tree: Tree) -> Tree:
    return {"token_ends": bytes(len(tree["token_ends"]))}


def _with_time(rng: random.Random, _tree: Tree) -> Tree:
    return {rng.choice(("created_s", "used_s")): rng.choice(_TIMES)}


def _with_count(rng: random.Random, _tree: Tree) -> Tree:
    return {rng.choice(("epoch", "revision")): rng.choice(_COUNTS)}


_CHANGES: list[Callable[[random.Random, Tree], Tree]] = [
    *(_with_longer_text, _with_long_token, _with_zero_ends, _with_time, _with_count)
]


def require_bounds(record: Manifest) -> None:
    """Fail unless the numbers of a decoded record are within their bounds."""
    count, text_bytes = record.tokens_count, len(record.text.encode())
    last_end = record.token_ends[-1] if count else 0
    assert 0 <= text_bytes - last_end <= TOKEN_TEXT_BYTES_MAX
    assert text_bytes <= TEXT_SLACK_BYTES + count * TOKEN_TEXT_BYTES_MAX
    assert all(0 <= time <= WALL_S_MAX for time in (record.created_s, record.used_s))
    assert 1 <= record.epoch <= EPOCH_ERASED_MAX
    assert 0 <= record.revision <= EPOCH_ERASED_MAX
