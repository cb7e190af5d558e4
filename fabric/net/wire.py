"""Frames of the data plane: the messages that two nodes exchange about blocks.

    client                                          server
      Hello ->
                                                 <- Challenge      proves the server
      Proof, FetchRequest, FetchRequest ... ->                     proves the client
                                                 <- PayloadHead, bytes, PayloadHead, bytes ...
      Goodbye ->

To measure a link, the client sends Ping (answered by Pong) or Probe (answered by ProbeChunks of
meaningless bytes). A PeerCall is answered by a PeerReply. Either end may send a Refusal and close.

A frame is magic, protocol version, kind and length in 8 bytes, then strict msgpack. The version
comes first, so any two versions can refuse each other. Payload bytes follow their head unframed.

After Proof every frame and payload slice ends with a MAC over itself and a counter, under a key per
direction derived from the cluster key and both nonces. So bytes arrive complete, in order, from
this peer and on this connection. If either end requires encryption, everything but heads is
encrypted; keys and proofs cover that choice.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import partial
from struct import Struct
from typing import Final

from fabric import PROTOCOL_VERSION
from fabric.codec import pack, unpack
from fabric.errors import (
    ConflictError,
    CorruptDataError,
    FabricError,
    NotFoundError,
    OverloadedError,
    RejectedError,
    RetryLaterError,
    TooLargeError,
    UnauthorizedError,
    require,
)
from fabric.ids import (
    BlockHash,
    Checksum,
    Fingerprint,
    NodeName,
    parse_block_hash,
    parse_checksum,
    parse_fingerprint,
    parse_node_name,
)
from fabric.limits import (
    BLOCK_BYTES_MAX,
    FRAME_BYTES_MAX,
    KIB,
    PROBE_BYTES_MAX,
    TRANSFER_SLICE_BYTES_MAX,
)


class Urgency(IntEnum):
    """Purpose of a fetch; the greater has priority."""

    PREFETCH = 0  # no client waits: a replica, a guess
    FETCH = 1  # a turn waits for a part of its prefix
    MIGRATION_COPY = 2  # the agent still serves on the source
    MIGRATION_TAIL = 3  # the agent serves nowhere until this is over


MAGIC: Final = b"mf"
HEAD_BYTES: Final = 8
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TICKET_BYTES_MAX: Final = 2 * KIB
FETCH_PARTS_MAX: Final = 64  # a request fits any socket buffer: sending one never blocks
MAC_BYTES: Final = 16
REFUSAL_CHARS_MAX: Final = 300
PINGS_MAX: Final = 16  # on one connection
PROBE_CHUNK_BYTES: Final = 256 * KIB
PEER_CALL_BYTES_MAX: Final = 96 * KIB  # the names of HEAD_TOKENS_MAX take 70
PEER_REPLY_BYTES_MAX: Final = FRAME_BYTES_MAX - KIB

_HEAD = Struct(">2sBBI")
_CODE = re.compile(r"[a-z0-9_]{1,40}", re.ASCII)


class PayloadCodec(StrEnum):
    """Encoding of payload bytes on the wire."""

    RAW = "raw"
    ZSTD = "zstd"


_require = partial(require, kind=RejectedError, code="bad_frame")


@dataclass(frozen=True, slots=True)
class Hello:
    """Client's first message: names, model, nonce, and whether it requires encryption."""

    name: NodeName
    source: NodeName
    fingerprint: Fingerprint
    nonce: bytes
    encrypts: bool = False

    def __post_init__(self) -> None:
        parse_node_name(self.name)
        parse_node_name(self.source)
        parse_fingerprint(self.fingerprint)
        _require(len(self.nonce) == NONCE_BYTES, "hello: wrong nonce length")


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's nonce, the agreed encryption, and its proof over these and the whole Hello."""

    nonce: bytes
    proof: bytes
    encrypts: bool = False  # either end requires it

    def __post_init__(self) -> None:
        _require(len(self.nonce) == NONCE_BYTES, "challenge: wrong nonce length")
        _require(len(self.proof) == PROOF_BYTES, "challenge: wrong proof length")


@dataclass(frozen=True, slots=True)
class Proof:
    """The client's proof over the same transcript."""

    proof: bytes

    def __post_init__(self) -> None:
        _require(len(self.proof) == PROOF_BYTES, "proof: wrong length")


@dataclass(frozen=True, slots=True)
class FetchPart:
    """`length` bytes of one block from `offset`."""

    block_hash: BlockHash
    checksum: Checksum
    offset: int
    length: int

    def __post_init__(self) -> None:
        parse_block_hash(self.block_hash)
        parse_checksum(self.checksum)
        _require(0 <= self.offset < BLOCK_BYTES_MAX, "fetch: offset out of range")
        _require(0 < self.length <= BLOCK_BYTES_MAX - self.offset, "fetch: length out of range")


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Ranges of blocks to send, in this order, under one ticket."""

    ticket: bytes
    parts: tuple[FetchPart, ...]
    link_bytes_per_s: int = 0  # measured or nominal; 0: never compress
    urgency: Urgency = Urgency.FETCH

    def __post_init__(self) -> None:
        _require(0 < len(self.ticket) <= TICKET_BYTES_MAX, "fetch: ticket length out of range")
        _require(0 < len(self.parts) <= FETCH_PARTS_MAX, "fetch: too few or too many blocks")
        _require(self.link_bytes_per_s >= 0, "fetch: negative link speed")


@dataclass(frozen=True, slots=True)
class PayloadHead:
    """One slice: `length` bytes of requested part `index`, from `offset` of its block.

    `wire_bytes` and their MAC follow.
    """

    index: int  # counts the parts requested on this connection
    offset: int
    length: int
    wire_bytes: int
    codec: PayloadCodec = PayloadCodec.RAW

    def __post_init__(self) -> None:
        """Refuse lengths that no honest sender produces, before anything is allocated."""
        _require(self.index >= 0 and self.offset >= 0, "payload: negative index or offset")
        _require(0 < self.length <= TRANSFER_SLICE_BYTES_MAX, "payload: length out of range")
        _require(self.offset <= BLOCK_BYTES_MAX - self.length, "payload: offset out of range")
        if self.codec is PayloadCodec.RAW:
            _require(self.wire_bytes == self.length, "payload: raw lengths differ")
        else:
            _require(0 < self.wire_bytes < self.length, "payload: compression gains nothing")


@dataclass(frozen=True, slots=True)
class Ping:
    """Request for a Pong of the same number, to measure the link's round trip."""

    number: int

    def __post_init__(self) -> None:
        """Refuse more than one connection may request."""
        _require(0 <= self.number < PINGS_MAX, "ping: number out of range")


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a Ping."""

    number: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Request for meaningless bytes, to measure the rate."""

    size_bytes: int

    def __post_init__(self) -> None:
        """Raise RejectedError for a probe so large that it would be a load."""
        _require(0 < self.size_bytes <= PROBE_BYTES_MAX, "probe: size out of range")


@dataclass(frozen=True, slots=True)
class ProbeChunk:
    """Part of the bytes that a Probe requested; authenticated like every frame."""

    data: bytes

    def __post_init__(self) -> None:
        """Raise RejectedError for an empty part of a probe."""
        _require(0 < len(self.data) <= PROBE_CHUNK_BYTES, "probe: chunk size out of range")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason of an end that refuses to continue, and closes after this message."""

    code: str
    message: str

    def __post_init__(self) -> None:
        """Refuse long or unprintable text: it ends in logs."""
        _require(_CODE.fullmatch(self.code) is not None, "refusal: bad code")
        short = len(self.message) <= REFUSAL_CHARS_MAX and self.message.isprintable()
        _require(short, "refusal: bad message")


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Notice of a client that has received everything."""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A control call of one node to another, as `fabric.control.calls` encodes it."""

    body: bytes

    def __post_init__(self) -> None:
        """Raise RejectedError for an empty call."""
        _require(0 < len(self.body) <= PEER_CALL_BYTES_MAX, "call: length out of range")


@dataclass(frozen=True, slots=True)
class PeerReply:
    """Answer to a PeerCall."""

    body: bytes

    def __post_init__(self) -> None:
        """Raise RejectedError for an empty reply."""
        _require(0 < len(self.body) <= PEER_REPLY_BYTES_MAX, "reply: length out of range")


Further = Ping | Pong | Probe | ProbeChunk | PeerCall | PeerReply
Message = Hello | Challenge | Proof | FetchRequest | PayloadHead | Refusal | Goodbye | Further

# Before its proof the peer is unknown: those frames are small enough to cost nothing.
_KINDS: Final[dict[int, tuple[type[Message], int]]] = {
    1: (Hello, 512),
    2: (Challenge, 256),
    3: (Proof, 128),
    4: (FetchRequest, 16 * KIB),
    5: (PayloadHead, 256),
    6: (Refusal, 2 * KIB),
    7: (Goodbye, 16),
    8: (PeerCall, PEER_CALL_BYTES_MAX + KIB),
    9: (PeerReply, FRAME_BYTES_MAX),
    16: (Ping, 64),
    17: (Pong, 64),
    18: (Probe, 64),
    19: (ProbeChunk, PROBE_CHUNK_BYTES + KIB),
}
_NUMBERS: Final = {kind: number for number, (kind, _) in _KINDS.items()}
assert all(limit <= FRAME_BYTES_MAX for _, limit in _KINDS.values()), "a frame is bounded"


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Kind and length of the message that follows."""

    kind: type[Message]
    body_bytes: int


def encode_frame(message: Message) -> bytes:
    """Encode one message with its head."""
    number = _NUMBERS[type(message)]
    body = pack(message)
    assert len(body) <= _KINDS[number][1], "a message keeps its own limit"
    return _HEAD.pack(MAGIC, PROTOCOL_VERSION, number, len(body)) + body


def decode_head(raw: bytes, expected: tuple[type[Message], ...]) -> FrameHead:
    """Parse a frame's 8 bytes; raise RejectedError unless one of `expected` follows."""
    _require(len(raw) == HEAD_BYTES, "not a frame")
    magic, version, number, body_bytes = _HEAD.unpack(raw)
    _require(magic == MAGIC, "not a frame of this protocol")
    if version != PROTOCOL_VERSION:
        message = f"the peer speaks protocol {version}, this node {PROTOCOL_VERSION}"
        raise RejectedError(message, code="protocol_version")
    kind, limit = _KINDS.get(number, (None, 0))
    if kind is None or kind not in expected:
        message = f"unexpected frame of kind {number}"
        raise RejectedError(message, code="bad_frame")
    if body_bytes > limit:
        message = f"{kind.__name__} of {body_bytes} bytes is over the limit of {limit}"
        raise TooLargeError(message)
    return FrameHead(kind, body_bytes)


def decode_body(head: FrameHead, body: bytes) -> Message:
    """Decode the body that `head` announced; raise RejectedError for anything else."""
    _require(len(body) == head.body_bytes, "frame body cut short")
    return unpack(head.kind, body, _KINDS[_NUMBERS[head.kind]][1])


def refusal_of(error: FabricError) -> Refusal:
    """Return the Refusal that reports `error` to the peer."""
    text = "".join(c if c.isprintable() else " " for c in error.message)
    return Refusal(error.code, text[:REFUSAL_CHARS_MAX])


_REFUSED: Final[dict[str, type[FabricError]]] = {
    "bad_key": UnauthorizedError,
    "bad_ticket": UnauthorizedError,
    "ticket_expired": UnauthorizedError,
    "not_offered": UnauthorizedError,
    "fingerprint_mismatch": ConflictError,
    "not_found": NotFoundError,
    "block_missing": NotFoundError,
    "corrupt_data": CorruptDataError,
    "overloaded": OverloadedError,
    "unavailable": RetryLaterError,
    "wrong_node": RejectedError,
    "protocol_version": RejectedError,
    "bad_frame": RejectedError,
    "bad_range": RejectedError,
    "invalid_message": RejectedError,
    "too_large": TooLargeError,
}
UNKNOWN_REFUSAL: Final = "unknown_refusal"
REFUSAL_CODES: Final = frozenset(_REFUSED) | {UNKNOWN_REFUSAL}


def refusal_error(refusal: Refusal) -> FabricError:
    """Return the error for a peer's refusal.

    Replaces a code outside the protocol by UNKNOWN_REFUSAL: an unauthenticated peer may send any
    text, and refusals are counted by code.
    """
    code = refusal.code if refusal.code in _REFUSED else UNKNOWN_REFUSAL
    kind = _REFUSED.get(code, RejectedError)
    return kind(f"the peer refuses: {refusal.message}", code=code)


# Names of the counters of a node's transfers since its start; `bounded` sums all others as OTHER,
# since a name may contain a code that the peer chose.
OTHER: Final = "other"
_REFUSED_COUNTS: Final = frozenset(f"refused_{code}" for code in REFUSAL_CODES)

SENDING: Final = _REFUSED_COUNTS | {
    "connections",
    "parts",
    "bytes",
    "calls",
    "slices_held_back",  # throttled by more urgent ones
    "broken",
    "refused_tampered",
}
FETCHING: Final = _REFUSED_COUNTS | {
    "dialled",
    "reused",
    "blocks",
    "bytes",  # as they arrived: fewer where compressed, more where repeated
    "resumed",  # blocks continued after a broken connection
    "failed_over",  # fetches that completed although a link broke
    "overtaken",  # connections whose work a much faster one took over
    "silent",
    "broken",
    "tampered",
    "corrupt",
}


def limit_names(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Keep the counts of `names`, and sum up all others as OTHER."""
    kept = {name: counts[name] for name in sorted(names) if name in counts}
    rest = sum(counts.values()) - sum(kept.values())
    return kept | ({OTHER: rest} if rest else {})
