"""A prompt's content in a few numbers, so that the router finds warm nodes without tokenizing.

Canonical text is cut into pieces of up to 512 bytes; each piece's hash includes all before
it, so two sketches agree on exactly their common prefix. A hint only: nodes compare text and
tokens.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from xxhash import xxh3_64

from fabric.limits import SKETCH_PIECE_BYTES, SKETCH_PIECES_MAX
from fabric.turn.messages import Message, template_form


def canonical_chunks(messages: Sequence[Message], tools: Sequence[Any] | None) -> Iterable[bytes]:
    """Yield tools and messages as bytes that are equal for equal conversations."""
    if tools:
        yield _spell(tools)
    for message in messages:
        yield _spell(template_form(message))


def _spell(value: Any) -> bytes:
    # Key order is kept: templates render arguments in the order given.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def sketch_chunks(chunks: Iterable[bytes]) -> tuple[int, ...]:
    """Chain-hash pieces of up to 512 bytes that end wherever a chunk ends.

    So a conversation's sketch, to its last message, begins the sketch of its next turn.
    """
    digest = xxh3_64(seed=1)
    pieces: list[int] = []
    for chunk in chunks:
        for start in range(0, len(chunk), SKETCH_PIECE_BYTES):
            digest.update(chunk[start : start + SKETCH_PIECE_BYTES])
            pieces.append(digest.intdigest())
            if len(pieces) == SKETCH_PIECES_MAX:
                return tuple(pieces)
    return tuple(pieces)


def sketch_ends(sizes_bytes: Iterable[int]) -> tuple[int, ...]:
    """Return the byte at which each piece ends, for chunks of the given sizes."""
    ends: list[int] = []
    chunk_start = 0
    for size_bytes in sizes_bytes:
        chunk_end = chunk_start + size_bytes
        first_end = chunk_start + SKETCH_PIECE_BYTES
        ends.extend(range(first_end, chunk_end, SKETCH_PIECE_BYTES))
        if size_bytes:
            ends.append(chunk_end)
        if len(ends) >= SKETCH_PIECES_MAX:
            return tuple(ends[:SKETCH_PIECES_MAX])
        chunk_start = chunk_end
    return tuple(ends)


def sketch_text(text: bytes) -> tuple[int, ...]:
    """Chain-hash the full 512-byte pieces of a text; a last partial piece is left out."""
    return sketch_chunks([text[: len(text) - len(text) % SKETCH_PIECE_BYTES]])


def is_whole_sketch(sketch: Sequence[int]) -> bool:
    """Return whether a sketch covers all messages: it is not cut at its limit."""
    return 0 < len(sketch) < SKETCH_PIECES_MAX


def continues_sketch(sketch: Sequence[int], longer: Sequence[int]) -> bool:
    """Return whether `longer` begins with all messages of `sketch`."""
    return is_whole_sketch(sketch) and sketch[-1] in longer


def common_pieces(a: Sequence[int], b: Sequence[int], most: int | None = None) -> int:
    """Count the leading pieces two sketches share, in O(log n): hashes are chained.

    No more than `most` are counted.
    """
    low, high = 0, min(len(a), len(b)) if most is None else most
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
