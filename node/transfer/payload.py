"""Sending and receiving of ranges of a block over a channel, raw or compressed."""

import time
from collections.abc import Callable, Iterator

from fabric.errors import CorruptDataError, RejectedError
from fabric.net.compression import (
    compress_slice,
    decompress_slice,
    zstd_may_save_time,
    zstd_saves_time,
)
from fabric.net.wire import FetchPart, PayloadCodec, PayloadHead, Refusal, refusal_error
from node.net.channel import Channel
from node.store.descriptors import Payload

ZSTD_REST_MAX = 64  # slices sent raw at most before compressing is tried again


class Compressor:
    """Compressor of one connection's slices; tries rarely if compression saves no time."""

    def __init__(self) -> None:
        """Start by trying to compress the first slice."""
        self._rest = self._left = 0

    def packed(self, raw: memoryview, link_bytes_per_s: int) -> bytes | None:
        """Return `raw` compressed, or None if that saves no time."""
        if self._left or not zstd_may_save_time(link_bytes_per_s):
            self._left = max(0, self._left - 1)
            return None
        started_s = time.perf_counter()
        packed = compress_slice(raw)
        speed = len(raw) / max(time.perf_counter() - started_s, 1e-6)
        if zstd_saves_time(link_bytes_per_s, len(packed) / len(raw), speed):
            self._rest = 0
            return packed
        self._rest = self._left = min(2 * self._rest + 1, ZSTD_REST_MAX)
        return None


def send_range(
    channel: Channel,
    payload: Payload,
    index: int,
    part: FetchPart,
    link_bytes_per_s: int,
    compressor: Compressor,
    yield_to_urgent: Callable[[], None],
) -> Iterator[int]:
    """Send the range `part` as number `index`; yield each slice's bytes on the wire.

    `yield_to_urgent` may wait; it is called once before each slice.
    """
    offset, end = part.offset, part.offset + part.length
    while offset < end:
        yield_to_urgent()
        length = min(channel.slice_bytes, end - offset)
        room = channel.room(length)
        payload.read_into(room, offset)
        packed = compressor.packed(room, link_bytes_per_s)
        if packed is None:
            head = PayloadHead(index, offset, length, length)
        else:
            room[: len(packed)] = packed
            head = PayloadHead(index, offset, length, len(packed), PayloadCodec.ZSTD)
        channel.send_slice(head)
        offset += length
        yield head.wire_bytes


def receive_slice(
    channel: Channel,
    index: int,
    offset: int,
    left_bytes: int,
    place: Callable[[], memoryview],
    *,
    is_last: bool = True,
) -> PayloadHead:
    """Receive the next slice of part `index` to `offset` of the block at `place`.

    `is_last`: no other part was requested after this one.
    Raises CorruptDataError for bytes outside of the `left_bytes` that were requested.
    """
    head = _receive_head(channel)
    if head.index != index or head.offset != offset or head.length > left_bytes:
        message = "the peer sends bytes that were not requested"
        raise CorruptDataError(message)
    view = place()[offset : offset + head.length]
    is_followed = head.length < left_bytes or not is_last
    if head.codec is PayloadCodec.ZSTD:
        packed = bytearray(head.wire_bytes)
        channel.receive_slice(memoryview(packed), is_followed=is_followed)
        decompress_slice(packed, view)
    else:
        channel.receive_slice(view, is_followed=is_followed)
    return head


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
