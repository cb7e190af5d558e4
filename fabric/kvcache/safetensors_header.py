"""Strict reader and writer of the safetensors header.

The reader takes a file's first bytes and its length. It requires that every byte of the data
belongs to exactly one tensor. Its memory use is bounded by the header's length, never by the sizes
that the header claims.

    length u64 LE | JSON, padded with spaces | tensor 0 | tensor 1 | …
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final, NoReturn

from fabric.errors import CorruptDataError
from fabric.kvcache.cache_spec import DTYPE_BYTES, TensorSpec
from fabric.limits import FILE_ALIGN_BYTES, HEADER_BYTES_MAX

LENGTH_BYTES: Final = 8
DIM_MAX: Final = (1 << 31) - 1  # array libraries count a dimension in 32 bits
DIMS_MAX: Final = 8
INTEGER_CHARS_MAX: Final = 16  # offsets stay below 2^53, as JSON numbers must
METADATA_KEY: Final = "__metadata__"
_ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class Header:
    """Valid header; tensors adjoin, so their order determines their offsets."""

    tensors: tuple[TensorSpec, ...]  # in file order
    metadata: dict[str, str]
    data_start: int


def render_header(
    tensors: Sequence[TensorSpec],
    metadata: dict[str, str],
    align_bytes: int = FILE_ALIGN_BYTES,
) -> bytes:
    """Return the header of `tensors`, padded so that the data after it starts aligned."""
    entries: dict[str, Any] = {METADATA_KEY: metadata}
    offset = 0
    for tensor in tensors:
        assert tensor.name not in entries, "tensor names are unique"
        end = offset + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode("ascii")
    body += b" " * (-(LENGTH_BYTES + len(body)) % align_bytes)
    assert len(body) <= HEADER_BYTES_MAX, "a header we write is one we read"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def parse_header(raw_prefix: bytes, file_bytes: int) -> Header:
    """Check the header of a file of `file_bytes` that starts with `raw_prefix`.

    Raises CorruptDataError for everything that the format or our limits do not allow.
    """
    data_start = _data_start(raw_prefix, file_bytes)
    entries = _parse_json(raw_prefix[LENGTH_BYTES:data_start])
    metadata = _metadata(entries.pop(METADATA_KEY, {}))
    placed = sorted(
        (_tensor(name, entry) for name, entry in entries.items()), key=lambda place: place[:2]
    )
    spans = [(0, 0), *(place[:2] for place in placed)]
    if any(before[1] != after[0] for before, after in pairwise(spans)):
        _refuse("tensors overlap or leave a hole")
    if spans[-1][1] != file_bytes - data_start:
        _refuse("the data's length differs from the total of its tensors")
    return Header(tuple(tensor for _, _, tensor in placed), metadata, data_start)


def _refuse(reason: str) -> NoReturn:
    message = f"safetensors header: {reason}"
    raise CorruptDataError(message)


def _data_start(raw_prefix: bytes, file_bytes: int) -> int:
    if len(raw_prefix) < LENGTH_BYTES:
        _refuse("is cut short")
    json_bytes = int.from_bytes(raw_prefix[:LENGTH_BYTES], "little")
    if json_bytes > HEADER_BYTES_MAX:
        _refuse(f"is longer than {HEADER_BYTES_MAX} bytes")
    data_start = LENGTH_BYTES + json_bytes
    if data_start > min(len(raw_prefix), file_bytes):
        _refuse("is cut short")
    return data_start


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        _refuse("repeats a key")
    return out


def _natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > INTEGER_CHARS_MAX:
        _refuse("a number is negative or too large")
    return int(digits)


def _no_fraction(_text: str) -> NoReturn:
    _refuse("a number is not an integer")


def _parse_json(raw: bytes) -> dict[str, Any]:
    body = raw.rstrip(b" ")
    if not (body.startswith(b"{") and body.endswith(b"}")):
        _refuse("is not one JSON object padded with spaces")
    try:
        entries = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_natural,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
    except (ValueError, RecursionError):
        _refuse("is not valid JSON")
    assert isinstance(entries, dict), "the text starts and ends with a brace"
    return entries


def _is_text(value: object) -> bool:
    # JSON escapes can spell half a surrogate pair, which no encoder accepts afterwards.
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse("metadata is not a map")
    if not all(_is_text(key) and _is_text(item) for key, item in value.items()):
        _refuse("metadata must map strings to strings")
    return value


def _tensor(name: str, entry: object) -> tuple[int, int, TensorSpec]:
    if not _is_text(name) or not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        _refuse("a tensor must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse("a dtype is not one that blocks have")
    if not _are_integers(shape) or len(shape) > DIMS_MAX or max(shape, default=0) > DIM_MAX:
        _refuse(f"a shape must be a list of at most {DIMS_MAX} sizes of 31 bits")
    if not _are_integers(offsets) or len(offsets) != 2:
        _refuse("data_offsets must be a pair")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        _refuse("data_offsets do not match shape and dtype")
    return begin, end, TensorSpec(name, dtype, tuple(shape))


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
