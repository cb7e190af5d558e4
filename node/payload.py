"""One block's bytes over a channel, out of a file and into a buffer, raw or compressed."""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fabric.block import BlockRef
from fabric.compression import compress_slice, decompress_slice, zstd_pays
from fabric.errors import CorruptDataError, RejectedError
from fabric.hashing import payload_checksum
from fabric.limits import BLOCK_BYTES_MAX, TICKET_BLOCKS_MAX
from fabric.wire import ZSTD_SLICE_BYTES, PayloadCodec, PayloadHead, Refusal, refusal_error
from node.channel import Channel

Allocate = Callable[[BlockRef], memoryview]
Done = Callable[[BlockRef, memoryview], None]


@dataclass(frozen=True, slots=True)
class OpenPayload:
    """A block's payload in an open file."""

    descriptor: int
    start: int
    length: int

    def read(self, length: int, offset: int) -> bytes:
        """Return some of its bytes; raise CorruptDataError where the file has fewer."""
        raw = os.pread(self.descriptor, length, self.start + offset)
        if len(raw) != length:
            raise _shrunk()
        return raw

    @contextmanager
    def view(self, offset: int) -> Iterator[memoryview]:
        """Lend its bytes from `offset` to its end, for system calls only.

        A file that fails under a mapping is EFAULT to them, and SIGBUS to anybody else.
        """
        start = self.start + offset
        lead = start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                self.descriptor,
                lead + self.length - offset,
                prot=mmap.PROT_READ,
                offset=start - lead,
            )
        except ValueError:
            raise _shrunk() from None
        with mapped, memoryview(mapped) as whole, whole[lead:] as view:
            yield view

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class HeldPayload:
    """A block's payload in memory: what a disk that encrypts has to lend."""

    whole: memoryview

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return len(self.whole)

    def read(self, length: int, offset: int) -> bytes:
        """Return some of its bytes."""
        return bytes(self.whole[offset : offset + length])

    @contextmanager
    def view(self, offset: int) -> Iterator[memoryview]:
        """Lend its bytes from `offset` to its end."""
        yield self.whole[offset:]

    def close(self) -> None:
        """Need nothing closed."""


Payload = OpenPayload | HeldPayload


def send_payload(
    channel: Channel, payload: Payload, index: int, offset: int, link_bytes_per_s: int
) -> int:
    """Send `payload` from `offset` to its end as part `index`; return the bytes on the wire."""
    sent = 0
    if link_bytes_per_s > 0:
        offset, sent = _send_compressed(channel, payload, index, offset, link_bytes_per_s)
    if offset < payload.length:
        _send_raw(channel, payload, index, offset)
        sent += payload.length - offset
    return sent


def _send_compressed(
    channel: Channel, payload: Payload, index: int, offset: int, link_bytes_per_s: int
) -> tuple[int, int]:
    """Send compressed slices for as long as that pays; return where it stopped."""
    sent = 0
    while offset < payload.length:
        length = min(ZSTD_SLICE_BYTES, payload.length - offset)
        raw = payload.read(length, offset)
        started_s = time.perf_counter()
        packed = compress_slice(raw)
        speed = length / max(time.perf_counter() - started_s, 1e-6)
        if not zstd_pays(link_bytes_per_s, len(packed) / length, speed):
            break
        channel.send(PayloadHead(index, offset, length, len(packed), PayloadCodec.ZSTD))
        channel.send_slices(memoryview(packed))
        offset += length
        sent += len(packed)
    return offset, sent


def _send_raw(channel: Channel, payload: Payload, index: int, offset: int) -> None:
    length = payload.length - offset
    with payload.view(offset) as view:
        channel.send(PayloadHead(index, offset, length, length))
        channel.send_slices(view)


def _shrunk() -> CorruptDataError:
    message = "the block's file is shorter than its record says"
    return CorruptDataError(message)


class Landing:
    """A block on its way in: where its bytes go and how many are there."""

    def __init__(self, ref: BlockRef) -> None:
        """Expect `ref`."""
        self.ref = ref
        self.view: memoryview | None = None
        self.filled = 0
        self.wire_bytes = 0
        self.wrong_count = 0
        self.was_cut = False

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self.filled == self.ref.payload_bytes

    def place(self, allocate: Allocate) -> memoryview:
        """Return the buffer, asking `allocate` for it the first time."""
        if self.view is None:
            view = allocate(self.ref).cast("B")
            assert len(view) == self.ref.payload_bytes, "allocate gives the payload's length"
            self.view = view
        return self.view

    def restart(self) -> None:
        """Trust none of the bytes that came."""
        self.filled = 0

    def check(self) -> None:
        """Raise CorruptDataError unless the bytes are the ones the record names."""
        assert self.complete, "checked when all bytes are there"
        assert self.view is not None, "complete blocks have a buffer"
        if payload_checksum([self.view]) != self.ref.checksum:
            message = f"block {self.ref.name} arrived with a wrong checksum"
            raise CorruptDataError(message)


def landings_of(refs: Sequence[BlockRef]) -> list[Landing]:
    """Expect each distinct block once, largest first; raise RejectedError for odd lengths."""
    if len(refs) > TICKET_BLOCKS_MAX:
        message = f"a fetch of {len(refs)} blocks is over the limit of {TICKET_BLOCKS_MAX}"
        raise RejectedError(message, code="invalid_fetch")
    if any(not 0 < ref.payload_bytes <= BLOCK_BYTES_MAX for ref in refs):
        message = "a block's length is out of range"
        raise RejectedError(message, code="invalid_fetch")
    distinct = {ref.name: Landing(ref) for ref in refs}
    return sorted(distinct.values(), key=lambda landing: -landing.ref.payload_bytes)


def receive_payload(channel: Channel, landing: Landing, index: int, allocate: Allocate) -> None:
    """Receive the rest of a block; what came before an error stays counted in `filled`."""
    while not landing.complete:
        head = _receive_head(channel)
        left = landing.ref.payload_bytes - landing.filled
        if head.index != index or head.offset != landing.filled or head.length > left:
            message = "the peer sends bytes that were not asked for"
            raise CorruptDataError(message)
        view = landing.place(allocate)[head.offset : head.offset + head.length]
        if head.codec is PayloadCodec.ZSTD:
            decompress_slice(channel.receive_bytes(head.wire_bytes), view)
            landing.filled += head.length
            landing.wire_bytes += head.wire_bytes
            continue
        received = 0
        while received < head.length:
            count = channel.receive_slice(view[received:])
            received += count
            landing.filled += count
            landing.wire_bytes += count


def _receive_head(channel: Channel) -> PayloadHead:
    try:
        reply = channel.receive(PayloadHead, Refusal)
    except RejectedError as error:
        message = f"the peer sends no valid frame: {error.message}"
        raise CorruptDataError(message) from None
    if isinstance(reply, Refusal):
        raise refusal_error(reply)
    assert isinstance(reply, PayloadHead), "one of the two expected kinds"
    return reply
