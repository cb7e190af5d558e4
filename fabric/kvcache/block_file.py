"""Format of a block file: a safetensors file that any tool opens.

    header, 16 KiB aligned | layer 0 keys.codes … | layer n values.biases | tokens U32 [n]

A file holds the layers of one group: all of the model's, unless some need only the last
tokens (windows) or one point (states). The header is a function of the model's cache spec,
the group and three digests, so a reader compares it byte for byte with the one it would have
written and parses nothing. The payload is everything after it; the tokens come last so that a
hit can compare them too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import BlockHash, Fingerprint, parse_block_hash, parse_fingerprint
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec, TensorSpec
from fabric.kvcache.safetensors_header import parse_header, render_header
from fabric.limits import BLOCK_BYTES_MAX, BLOCK_TOKENS

FORMAT: Final = "macfabric-block"
VERSION: Final = "1"
TOKENS_TENSOR: Final = "tokens"
TOKEN_BYTES: Final = 4
_DIGESTS: Final = ("fingerprint", "parent", "block_hash")
_DIGEST_CHARS: Final = 64


def payload_tensors(
    spec: ModelCacheSpec, tokens_count: int, group: CacheGroup = CacheGroup.FULL
) -> tuple[TensorSpec, ...]:
    """List the tensors of a group's block of `tokens_count` tokens in file order."""
    assert 0 < tokens_count <= BLOCK_TOKENS, "a block holds 1-256 tokens"
    tokens = TensorSpec(TOKENS_TENSOR, "U32", (tokens_count,))
    return (*spec.tensors(tokens_count, group), tokens)


def payload_bytes(
    spec: ModelCacheSpec, tokens_count: int, group: CacheGroup = CacheGroup.FULL
) -> int:
    """Bytes of a block after its header: packed cache, then token ids."""
    count = spec.kv_bytes(tokens_count, group) + tokens_count * TOKEN_BYTES
    assert count <= BLOCK_BYTES_MAX, "the model's blocks are within the limit"
    return count


def render_block_header(
    spec: ModelCacheSpec,
    fingerprint: Fingerprint,
    parent: BlockHash,
    block_hash: BlockHash,
    tokens_count: int,
    group: CacheGroup = CacheGroup.FULL,
) -> bytes:
    """Return the only header that a file of this block may have."""
    first, second, third, last = _template(spec, tokens_count, group)
    digests = [digest.hex().encode() for digest in (fingerprint, parent, block_hash)]
    assert all(len(digest) == _DIGEST_CHARS for digest in digests), "digests are 32 bytes"
    return b"".join((first, digests[0], second, digests[1], third, digests[2], last))


def parse_parent(
    raw_header: bytes,
    spec: ModelCacheSpec,
    fingerprint: Fingerprint,
    block_hash: BlockHash,
    tokens_count: int,
    group: CacheGroup = CacheGroup.FULL,
) -> BlockHash:
    """Return the parent that a whole block header names; raise CorruptDataError in doubt."""
    header = parse_header(raw_header, len(raw_header) + payload_bytes(spec, tokens_count, group))
    message = "the block header differs from the expected one"
    try:
        parent = parse_block_hash(bytes.fromhex(header.metadata.get("parent", "")))
    except (ValueError, RejectedError):
        raise CorruptDataError(message) from None
    expected = render_block_header(spec, fingerprint, parent, block_hash, tokens_count, group)
    if raw_header != expected:
        raise CorruptDataError(message)
    return parent


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Header of a block file; none of it is verified."""

    fingerprint: Fingerprint
    parent: BlockHash
    block_hash: BlockHash
    group: CacheGroup
    tokens_count: int
    data_start: int


def read_block_header(raw_prefix: bytes, file_bytes: int) -> BlockHeader:
    """Parse a block file's header without the model's spec; raise CorruptDataError in doubt.

    For checkers that have no spec. It proves that the file is a safetensors file of ours, not
    that its tensors are the model's.
    """
    header = parse_header(raw_prefix, file_bytes)
    metadata, last = header.metadata, header.tensors[-1:]
    if metadata.keys() != {"format", "version", "group", *_DIGESTS} or metadata["format"] != FORMAT:
        message = "not a block file"
        raise CorruptDataError(message)
    if metadata["version"] != VERSION:
        message = f"the block file's version is not {VERSION}"
        raise CorruptDataError(message)
    try:
        digests = [bytes.fromhex(metadata[digest]) for digest in _DIGESTS]
        fingerprint = parse_fingerprint(digests[0])
        parent, block_hash = map(parse_block_hash, digests[1:])
        group = CacheGroup(metadata["group"])
    except (ValueError, RejectedError):
        message = "the block header's metadata are invalid"
        raise CorruptDataError(message) from None
    count = last[0].shape[0] if last and len(last[0].shape) == 1 else 0
    if last != (TensorSpec(TOKENS_TENSOR, "U32", (count,)),) or not 0 < count <= BLOCK_TOKENS:
        message = "the block file does not end with its tokens"
        raise CorruptDataError(message)
    start = header.data_start
    return BlockHeader(fingerprint, parent, block_hash, group, count, start)


@lru_cache(maxsize=8)
def tokens_by_file_bytes(
    spec: ModelCacheSpec, group: CacheGroup = CacheGroup.FULL
) -> Mapping[int, int]:
    """Map each length a group's file may have to its tokens: a longer file holds more."""
    sizes = {
        len(_render_template(spec, count, group)) + payload_bytes(spec, count, group): count
        for count in range(1, BLOCK_TOKENS + 1)
    }
    assert len(sizes) == BLOCK_TOKENS, "the length of a file determines its number of tokens"
    return sizes


def _marker(digest: str) -> str:
    return f"<{digest}>".ljust(_DIGEST_CHARS, "-")


def _render_template(spec: ModelCacheSpec, tokens_count: int, group: CacheGroup) -> bytes:
    metadata = {"format": FORMAT, "version": VERSION, "group": group.value}
    metadata |= {digest: _marker(digest) for digest in _DIGESTS}
    return render_header(payload_tensors(spec, tokens_count, group), metadata)


@lru_cache(maxsize=64)
def _template(
    spec: ModelCacheSpec, tokens_count: int, group: CacheGroup
) -> tuple[bytes, bytes, bytes, bytes]:
    parts = []
    rest = _render_template(spec, tokens_count, group)
    for digest in _DIGESTS:
        part, _, rest = rest.partition(_marker(digest).encode())
        parts.append(part)
    return parts[0], parts[1], parts[2], rest
