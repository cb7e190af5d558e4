"""One agent as one signed file, verifiable as it streams.

    "MFHIBER1" | HEADER | RECORD … | BLOCK … | END
    frame      kind u8, three zeros, length u32 | body | tag

A tag is keyed BLAKE2b-256 over the tag before it, the frame's first eight bytes and its body:
no frame can be changed, left out, repeated or moved. The header's numbers say how long the
record is, and the record says how long each block is, so every length is checked against what
must come before anything is allocated. END holds xxh3-128 over everything before it: a
reader without the key (the command line, storing a file) can still detect damage.
"""

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from hashlib import blake2b
from typing import Final

from xxhash import xxh3_128

from fabric.codec import pack, unpack
from fabric.errors import RejectedError, TooLargeError
from fabric.ids import FINGERPRINT_BYTES, AgentId, Fingerprint, TenantId, parse_agent_id
from fabric.kvcache.hashing import tenant_salt
from fabric.limits import (
    AGENT_TOKENS_MAX,
    EPOCH_MAX,
    HIBERNATION_BYTES_MAX,
    HIBERNATION_FRAME_BYTES_MAX,
    HIBERNATION_HEADER_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MODEL_NAME_CHARS_MAX,
    TICKET_BLOCKS_MAX,
)
from fabric.record.bounds import is_wall_time

FAMILY: Final = b"MFHIBER"
MAGIC: Final = FAMILY + b"1"
SIGNING_KEY_BYTES: Final = 32
SALT_BYTES_MAX: Final = 64
KEY_ID_BYTES: Final = 8
TAG_BYTES: Final = 32
HEAD_BYTES: Final = 8
END_BYTES: Final = 16
OVERHEAD_BYTES: Final = HEAD_BYTES + TAG_BYTES
# Length of a file's beginning that always holds its header.
LEAD_BYTES_MAX: Final = len(MAGIC) + OVERHEAD_BYTES + HIBERNATION_HEADER_BYTES_MAX


class FrameKind(IntEnum):
    """Kind of a frame's body; frames come in this order."""

    HEADER = 1
    RECORD = 2
    BLOCK = 3
    END = 4


class SignedWith(StrEnum):
    """Owner of the key that makes the tags."""

    FABRIC = "fabric"  # the cluster key and the tenant: for this fabric only
    KEY = "key"  # from the caller: for any fabric with that key


_LENGTH_MAX: Final = {
    FrameKind.HEADER: HIBERNATION_HEADER_BYTES_MAX,
    FrameKind.RECORD: HIBERNATION_FRAME_BYTES_MAX,
    FrameKind.BLOCK: HIBERNATION_FRAME_BYTES_MAX,
    FrameKind.END: END_BYTES,
}
_KINDS: Final = frozenset(int(kind) for kind in FrameKind)


@dataclass(frozen=True, slots=True)
class HibernationHeader:
    """First frame of a file: its description."""

    signed_with: SignedWith
    key_id: bytes  # distinguishes a wrong key from a damaged file
    salt: bytes  # from which the owner of the caller's key derives it again; not secret
    tenant: TenantId  # empty in a file that may leave the fabric
    agent: AgentId
    fingerprint: Fingerprint
    model: str
    epoch: int
    revision: int
    tokens_count: int
    blocks_count: int
    record_bytes: int
    payload_bytes: int  # of all blocks
    created_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One verified frame."""

    kind: FrameKind
    body: bytes = field(repr=False)


def fabric_signing_key(cluster_key: bytes, tenant: TenantId) -> bytes:
    """Derive the 32-byte key that signs one tenant's files for this fabric only."""
    salt = tenant_salt(cluster_key, tenant)
    return blake2b(digest_size=SIGNING_KEY_BYTES, key=salt, person=b"mf-hibernate").digest()


def caller_signing_key(key: bytes) -> bytes:
    """Derive the key that signs a hibernation file from a caller's 32-byte key."""
    if len(key) != SIGNING_KEY_BYTES:
        message = f"a signing key must have {SIGNING_KEY_BYTES} bytes"
        raise RejectedError(message, code="invalid_signing_key")
    return blake2b(digest_size=SIGNING_KEY_BYTES, key=key, person=b"mf-hibern-key").digest()


def key_id(signing_key: bytes) -> bytes:
    """Return the 8 bytes by which a file names the key it is signed with."""
    return blake2b(digest_size=KEY_ID_BYTES, key=signing_key, person=b"mf-hibern-id").digest()


def require_sound(holds: bool, why: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise RejectedError with a reason unless `holds`."""
    if not holds:
        message = f"the hibernation file is damaged: {why}"
        raise RejectedError(message, code="damaged_file")


# --- writing -----------------------------------------------------------------------------------


def file_bytes(header: HibernationHeader, block_bytes: Iterable[int]) -> int:
    """Return the length of the file with this header and blocks of these lengths."""
    sizes = [len(pack(header)), header.record_bytes, *block_bytes, END_BYTES]
    frames_count = sum(-(-size // HIBERNATION_FRAME_BYTES_MAX) for size in sizes)
    return len(MAGIC) + sum(sizes) + frames_count * OVERHEAD_BYTES


def encode_file(
    header: HibernationHeader, record: bytes, payloads: Iterable[memoryview], signing_key: bytes
) -> Iterator[bytes]:
    """Yield the file in pieces of about 1 MiB; `payloads` are read one by one as it goes."""
    assert header.key_id == key_id(signing_key), "the header names the key"
    assert header.record_bytes == len(record), "the header tells the record's length"
    chain, checksum = _TagChain(signing_key), xxh3_128()

    def frame(kind: FrameKind, body: bytes | memoryview) -> bytes:
        head = bytes([kind, 0, 0, 0]) + len(body).to_bytes(4, "little")
        whole = b"".join((head, body, chain.next(head, body)))
        checksum.update(whole)
        return whole

    checksum.update(MAGIC)
    yield MAGIC + frame(FrameKind.HEADER, pack(header))
    for part in _parts(memoryview(record)):
        yield frame(FrameKind.RECORD, part)
    for payload in payloads:
        for part in _parts(payload):
            yield frame(FrameKind.BLOCK, part)
    yield frame(FrameKind.END, checksum.digest())


def _parts(whole: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(whole), HIBERNATION_FRAME_BYTES_MAX):
        yield whole[start : start + HIBERNATION_FRAME_BYTES_MAX]


class _TagChain:
    """Chain of a file's tags, each computed over the one before."""

    def __init__(self, signing_key: bytes) -> None:
        self._key = signing_key
        self._last = bytes(TAG_BYTES)

    def next(self, head: bytes, body: bytes | memoryview) -> bytes:
        """Return the tag of the next frame."""
        tag = blake2b(self._last, digest_size=TAG_BYTES, key=self._key, person=b"mf-hibern-frame")
        tag.update(head)
        tag.update(body)
        self._last = tag.digest()
        return self._last


# --- reading -----------------------------------------------------------------------------------


def peek_header(lead: bytes) -> HibernationHeader | None:
    """Read the unverified header from a file's first bytes; return None if more are needed.

    Raises RejectedError for a file of another format. `LEAD_BYTES_MAX` bytes suffice.
    """
    _check_magic(lead)
    start = len(MAGIC) + HEAD_BYTES
    if len(lead) < start:
        return None
    kind, length = _parse_head(lead[len(MAGIC) : start])
    require_sound(kind is FrameKind.HEADER, "it does not begin with its header")
    body = lead[start : start + length]
    return _parse_header(body) if len(body) == length else None


class FrameReader:
    """Incremental reader that verifies a file's frames.

    Buffers at most one frame besides the bytes it is fed. Without a signing key it checks lengths,
    order and the checksum at the end, which tell damage but not forgery.
    """

    def __init__(self, signing_key: bytes | None) -> None:
        self._chain = _TagChain(signing_key) if signing_key is not None else None
        self._checksum = xxh3_128()
        self._pending = bytearray()
        self._has_begun = False
        self._last_kind: FrameKind | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole file was read."""
        return self._last_kind is FrameKind.END and not self._pending

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that these bytes complete; raise RejectedError if one is invalid."""
        self._pending += data
        if not self._has_begun:
            _check_magic(self._pending)
            if len(self._pending) < len(MAGIC):
                return
            self._checksum.update(MAGIC)
            del self._pending[: len(MAGIC)]
            self._has_begun = True
        while len(self._pending) >= HEAD_BYTES:
            head = bytes(self._pending[:HEAD_BYTES])
            kind, length = self._next_head(head)
            frame_bytes = HEAD_BYTES + length + TAG_BYTES
            if len(self._pending) < frame_bytes:
                return
            raw = bytes(self._pending[:frame_bytes])
            del self._pending[:frame_bytes]
            yield self._verify_frame(kind, raw)
        is_over = self._last_kind is FrameKind.END
        require_sound(not (is_over and self._pending), "bytes follow its end")

    def finish(self) -> None:
        """Raise RejectedError unless the file is complete."""
        if not self.is_complete:
            message = (
                "the hibernation file was cut short: send all of it, or hibernate the agent again"
            )
            raise RejectedError(message, code="truncated_file")

    def _next_head(self, head: bytes) -> tuple[FrameKind, int]:
        kind, length = _parse_head(head)
        # Record and blocks may take several frames each; other kinds must occur once.
        last = self._last_kind or 0
        repeats = kind == last and kind in (FrameKind.RECORD, FrameKind.BLOCK)
        require_sound(kind == last + 1 or repeats, "its parts are not in order")
        return kind, length

    def _verify_frame(self, kind: FrameKind, raw: bytes) -> Frame:
        whole = memoryview(raw)
        body, tag = whole[HEAD_BYTES:-TAG_BYTES], whole[-TAG_BYTES:]
        if self._chain is not None:
            expected = self._chain.next(raw[:HEAD_BYTES], body)
            require_sound(hmac.compare_digest(expected, tag), "a signature does not match")
        is_end = kind is FrameKind.END
        require_sound(not is_end or self._checksum.digest() == body, "its checksum does not match")
        self._checksum.update(whole)
        self._last_kind = kind
        return Frame(kind, bytes(body))


def open_reader(header: HibernationHeader, signing_key: bytes) -> FrameReader:
    """Return a reader for the file of `header`; raise RejectedError for another key."""
    if not hmac.compare_digest(header.key_id, key_id(signing_key)):
        message = (
            "the hibernation file is signed by another fabric or tenant; to move an agent there, "
            "hibernate it with a key file and resume it with the same one"
            if header.signed_with is SignedWith.FABRIC
            else "the hibernation file is signed with another key than the one given"
        )
        raise RejectedError(message, code="wrong_key")
    return FrameReader(signing_key)


def _check_magic(lead: bytes | bytearray) -> None:
    magic = bytes(lead[: len(MAGIC)])
    if MAGIC.startswith(magic):
        return
    if magic.startswith(FAMILY):
        message = (
            "this macfabric cannot read the hibernation file's format version: resume it with the "
            "version that wrote it"
        )
        raise RejectedError(message, code="unknown_version")
    message = "this is not a hibernation file: send one that `macfabric hibernate` wrote"
    raise RejectedError(message, code="not_a_hibernation_file")


def _parse_head(head: bytes) -> tuple[FrameKind, int]:
    length = int.from_bytes(head[4:], "little")
    require_sound(head[0] in _KINDS and not any(head[1:4]), "a part has an unknown kind")
    kind = FrameKind(head[0])
    least = END_BYTES if kind is FrameKind.END else 1
    require_sound(least <= length <= _LENGTH_MAX[kind], "a part's length is out of range")
    return kind, length


def _parse_header(body: bytes) -> HibernationHeader:
    try:
        header = unpack(HibernationHeader, body, HIBERNATION_HEADER_BYTES_MAX)
        parse_agent_id(header.agent)
    except RejectedError as error:
        message = f"the hibernation file's header does not decode: {error.message}"
        raise RejectedError(message, code="damaged_file") from None
    if header.payload_bytes > HIBERNATION_BYTES_MAX:
        message = f"the agent's KV cache is over the limit of {HIBERNATION_BYTES_MAX} bytes"
        raise TooLargeError(message)
    require_sound(_is_plausible(header), "a number of its header is out of range")
    return header


def _is_plausible(header: HibernationHeader) -> bool:
    return (
        len(header.fingerprint) == FINGERPRINT_BYTES
        and len(header.key_id) == KEY_ID_BYTES
        and len(header.salt) <= SALT_BYTES_MAX
        and len(header.model) <= MODEL_NAME_CHARS_MAX
        and (header.tenant == "") is (header.signed_with is SignedWith.KEY)
        and 1 <= header.epoch < EPOCH_MAX
        and 0 <= header.revision < EPOCH_MAX
        and 1 <= header.tokens_count <= AGENT_TOKENS_MAX
        and 1 <= header.blocks_count <= TICKET_BLOCKS_MAX
        and 1 <= header.record_bytes <= MANIFEST_BYTES_MAX
        and header.payload_bytes >= 1
        and is_wall_time(header.created_s)
    )
