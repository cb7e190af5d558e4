"""Hostile inputs from valid ones: bytes changed blindly, trees changed by their structure."""

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

INTERESTING = [
    *(0, 1, -1, 2, 7, 15, 16, 31, 32, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, -(2**31), -(2**63), 2**64 - 1),
]
HOSTILE: list[Any] = [
    *(None, True, False, 0.0, -0.0, 1e308, float("inf"), float("nan")),
    *("", "a", "../../x", "a\0b", "é", "\u202e", "x" * 300, "0" * 64, "full", "none"),
    *(b"", b"\0", b"\xff" * 16, bytes(32), bytes(33), b"x" * 300),
    *([], {}, [[]], [0] * 300, {"": 0}, {"a": {"b": {"c": []}}}),
]
Tree = Any


def mutate_bytes(rng: random.Random, raw: bytes, others: list[bytes]) -> bytes:
    """Change one to four places: bits, bytes, numbers, slices, and pieces of other inputs."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _CHANGES[rng.randrange(len(_CHANGES))](rng, out, others)
    return bytes(out)


def _flip(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    if out:
        at = rng.randrange(len(out))
        out[at] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x7B, 0x22, 0x5B))


def _number(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTERESTING) % (1 << 8 * size)
    at = rng.randrange(max(1, len(out) - size + 1))
    out[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))


def _delete(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    del out[at : at + rng.choice((1, 1, 2, 8, 64))]


def _repeat(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    piece = out[at : at + rng.choice((1, 2, 8, 64))]
    out[at:at] = piece * rng.choice((1, 2, 16))


def _insert(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    out[at:at] = rng.randbytes(rng.choice((1, 1, 2, 8, 64)))


def _cut(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    del out[rng.randrange(len(out) + 1) :]


def _splice(rng: random.Random, out: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others)
    out[rng.randrange(len(out) + 1) :] = other[rng.randrange(len(other) + 1) :]


_CHANGES: list[Callable[[random.Random, bytearray, list[bytes]], None]] = [
    *(_flip, _set, _number, _delete, _repeat, _insert, _cut, _splice)
]


def mutate_tree(rng: random.Random, tree: Tree) -> Tree:
    """Change one to three nodes of plain data, however deep they lie."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _changed(rng, tree, depth=rng.randrange(7))
    return tree


def _changed(rng: random.Random, tree: Tree, depth: int) -> Tree:
    if depth and isinstance(tree, dict) and tree:
        key = rng.choice(list(tree))
        return {**tree, key: _changed(rng, tree[key], depth - 1)}
    if depth and isinstance(tree, list) and tree:
        at = rng.randrange(len(tree))
        return [*tree[:at], _changed(rng, tree[at], depth - 1), *tree[at + 1 :]]
    return _replaced(rng, tree)


def _replaced(rng: random.Random, tree: Tree) -> Tree:
    if isinstance(tree, dict) and tree and rng.random() < 0.6:
        return _other_map(rng, tree)
    if isinstance(tree, list) and rng.random() < 0.6:
        return _other_list(rng, tree)
    if type(tree) is int and rng.random() < 0.7:
        return rng.choice((tree + 1, tree - 1, -tree, 2 * tree, rng.choice(INTERESTING)))
    if isinstance(tree, (bytes, str)) and tree and rng.random() < 0.5:
        cut = rng.randrange(len(tree) + 1)
        return rng.choice((tree[:cut], tree + tree, tree[cut:] + tree[:cut]))
    return rng.choice(HOSTILE)


def _other_map(rng: random.Random, tree: dict[str, Tree]) -> Tree:
    key, other = rng.choice(list(tree)), rng.choice(list(tree))
    without = {name: value for name, value in tree.items() if name != key}
    return rng.choice(
        (
            without,
            {**without, "unknown": tree[key]},
            {**tree, key: tree[other]},
            {**tree, rng.choice(("", "__metadata__", "layers.0", "x" * 100)): tree[key]},
        )
    )


def _other_list(rng: random.Random, tree: list[Tree]) -> Tree:
    at = rng.randrange(len(tree) + 1)
    return rng.choice(
        (
            [*tree[:at], *tree[at + 1 :]],
            [*tree[:at], rng.choice(HOSTILE), *tree[at:]],
            [*tree, *tree],
            tree[::-1],
            [tree],
        )
    )


def spell_msgpack(rng: random.Random, tree: Tree) -> bytes:
    """Encode plain data as msgpack, sometimes with a repeated key or an extension."""
    chance = rng.random()
    try:
        if chance < 0.02 and isinstance(tree, dict) and tree:
            key = rng.choice(list(tree))
            pairs = [*tree.items(), (key, tree[key])]
            return msgpack.Packer(use_bin_type=True).pack_map_pairs(pairs)
        if chance < 0.04:
            tree = {"x": msgpack.ExtType(rng.randrange(128), b"ext"), **_as_map(tree)}
        return msgpack.packb(tree, use_bin_type=True)
    except (OverflowError, ValueError):  # numbers that msgpack cannot encode
        return b"\xc1"


def _as_map(tree: Tree) -> dict[str, Tree]:
    return tree if isinstance(tree, dict) else {"y": tree}


def spell_json(rng: random.Random, tree: Tree) -> bytes:
    """Encode plain data as JSON, sometimes with a repeated key, or very deep."""
    text = json.dumps(tree, default=lambda value: value.decode("latin-1"))
    chance = rng.random()
    if chance < 0.02 and text.startswith('{"'):
        text = "{" + text[1:-1] + "," + text[1:-1] + "}"
    elif chance < 0.03:
        depth = rng.choice((10, 100, 5_000))
        text = '{"a":' * depth + text + "}" * rng.choice((depth, depth - 1))
    return text.encode("utf-8", "surrogatepass")
