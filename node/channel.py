"""One data-plane connection: bounded frames and payload slices, each under a deadline and a MAC.

Sockets block, so that one system call moves a whole slice without coming back for the GIL: next
to a busy Python thread every return costs up to 5 ms. Deadlines are kept by whoever watches
(`expire`), which shuts the socket down and so wakes the blocked call. A receive comes back now
and then with what there is, so that the watcher can tell a slow link from a dead one.
"""

import math
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final

from fabric.errors import FabricError, RejectedError
from fabric.limits import KIB, TRANSFER_SLICE_BYTES_MAX, TRANSFER_SLICE_BYTES_MIN
from fabric.wire import (
    HEAD_BYTES,
    MAC_BYTES,
    Message,
    PayloadHead,
    decode_body,
    decode_head,
    encode_frame,
    refusal_of,
)
from node.frame_seal import FrameSeal, TamperedError

SLICE_FAST_S: Final = 0.25  # a slice faster than this is doubled, a slower one halved
LINGER_S: Final = 0.5
LINGER_BYTES: Final = 64 * KIB
TICK_S: Final = 0.25  # a receive in progress tells at least so often what has come
_ROOM_BYTES: Final = 512  # before a slice, for its head
_TICK = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1_000_000))


class Channel:
    """A connected socket; used by one thread, watched and cut by another."""

    def __init__(self, sock: socket.socket, now_s: Callable[[], float], patience_s: float) -> None:
        """Take over `sock`; `patience_s` bounds one frame or one payload slice."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        self._sock = sock
        self._now_s = now_s
        self._patience_s = patience_s
        self._deadline_s = math.inf  # set while blocked only: between calls nobody is late
        self._silent_since_s = math.inf  # likewise
        self._is_hurried = False
        self._expired = False
        self._closing = Lock()  # a descriptor must not be shut down after it was reused
        self._outgoing: FrameSeal | None = None
        self._incoming: FrameSeal | None = None
        self._buffer = memoryview(b"")
        self._slice_bytes = TRANSFER_SLICE_BYTES_MIN

    @property
    def slice_bytes(self) -> int:
        """How much to send under one MAC now."""
        return self._slice_bytes

    def seal(self, outgoing: bytes, incoming: bytes) -> None:
        """Put a MAC behind all that follows; each direction has its own key."""
        self._outgoing, self._incoming = FrameSeal(outgoing), FrameSeal(incoming)

    def hurry(self, seconds: float) -> None:
        """Bound everything until `relax` by one deadline, however the bytes trickle in."""
        self._deadline_s = self._now_s() + seconds
        self._is_hurried = True

    def relax(self) -> None:
        """Bound each frame and slice by itself again."""
        self._is_hurried = False
        self._deadline_s = math.inf

    def expire(self, now_s: float) -> bool:
        """Cut the connection if its deadline has passed; for the watching thread."""
        if now_s <= self._deadline_s:
            return False
        self._expired = True
        self.cut()
        return True

    def silence_s(self, now_s: float) -> float:
        """Seconds for which a receive has waited without a byte; 0 while none waits."""
        return max(0.0, now_s - self._silent_since_s)

    def cut(self) -> None:
        """Wake whoever is blocked on this connection with an error."""
        with self._closing, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with self._closing:
            self._sock.close()

    def local_host(self) -> str:
        """Return this end's address, which stands for the link."""
        return str(self._sock.getsockname()[0])

    def is_quiet(self) -> bool:
        """Say whether the peer has neither sent anything unasked nor hung up."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, *messages: Message) -> None:
        """Send messages in one go."""
        raw = b"".join(self._sealed(encode_frame(message)) for message in messages)
        with self._timed():
            self._sock.sendall(raw)

    def receive(self, *expected: type[Message]) -> Message:
        """Receive one of `expected`; raise RejectedError or TamperedError for anything else."""
        with self._timed():
            raw = bytes(self._receive_exactly(HEAD_BYTES))
            try:
                head = decode_head(raw, expected)
            except RejectedError as error:
                if self._incoming is None:
                    raise
                message = f"no proven peer sends this: {error.message}"
                raise TamperedError(message) from None
            if self._incoming is None:
                return decode_body(head, bytes(self._receive_exactly(head.body_bytes)))
            rest = bytes(self._receive_exactly(head.body_bytes + MAC_BYTES))
        self._incoming.check(raw + rest[:-MAC_BYTES], rest[-MAC_BYTES:])
        return decode_body(head, rest[:-MAC_BYTES])

    def receive_slice(self, view: memoryview) -> None:
        """Fill `view` with a payload slice; raise TamperedError if it is not the peer's."""
        assert self._incoming is not None, "payload travels after the handshake"
        mac = memoryview(bytearray(MAC_BYTES))
        with self._timed():
            filled = 0
            while filled < len(view):
                filled += self._receive_some([view[filled:], mac])
            got = filled - len(view)
            while got < MAC_BYTES:
                got += self._receive_some([mac[got:]])
        self._incoming.check(view, mac)

    def room(self, length: int) -> memoryview:
        """Lend the place where the next slice is to be put."""
        if not self._buffer:
            self._buffer = memoryview(bytearray(_ROOM_BYTES + TRANSFER_SLICE_BYTES_MAX + MAC_BYTES))
        return self._buffer[_ROOM_BYTES : _ROOM_BYTES + length]

    def send_slice(self, head: PayloadHead) -> None:
        """Send the first `head.wire_bytes` of `room` as the slice that `head` announces."""
        assert self._outgoing is not None, "payload travels after the handshake"
        raw = self._sealed(encode_frame(head))
        start, end = _ROOM_BYTES - len(raw), _ROOM_BYTES + head.wire_bytes
        self._buffer[start:_ROOM_BYTES] = raw
        self._buffer[end : end + MAC_BYTES] = self._outgoing.mac(self._buffer[_ROOM_BYTES:end])
        started_s = self._now_s()
        with self._timed():
            self._sock.sendall(self._buffer[start : end + MAC_BYTES])
        if self._now_s() - started_s < SLICE_FAST_S:
            self._slice_bytes = min(self._slice_bytes * 2, TRANSFER_SLICE_BYTES_MAX)
        else:
            self._slice_bytes = max(self._slice_bytes // 2, TRANSFER_SLICE_BYTES_MIN)

    def refuse(self, error: FabricError) -> None:
        """Say why, and let the peer read it: closing over unread bytes would destroy it."""
        self.hurry(LINGER_S)
        with suppress(OSError):
            self._sock.sendall(self._sealed(encode_frame(refusal_of(error))))
            self._sock.shutdown(socket.SHUT_WR)
            left, view = LINGER_BYTES, memoryview(bytearray(LINGER_BYTES))
            while left > 0:
                left -= self._receive_some([view[:left]])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = self._now_s()
        if not self._is_hurried:
            self._deadline_s = started_s + self._patience_s
        try:
            yield
        finally:
            self._silent_since_s = math.inf
            if not self._is_hurried:
                self._deadline_s = math.inf

    def _sealed(self, frame: bytes) -> bytes:
        return frame if self._outgoing is None else frame + self._outgoing.mac(frame)

    def _receive_exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            filled += self._receive_some([view[filled:]])
        return buffer

    def _receive_some(self, views: list[memoryview]) -> int:
        """Receive at least one byte."""
        if self._silent_since_s == math.inf:
            self._silent_since_s = self._now_s()
        while True:
            try:
                count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # nothing came for one tick
                if self._expired:
                    raise self._ended() from None
                continue
            if not count:
                raise self._ended()
            self._silent_since_s = self._now_s()
            return count

    def _ended(self) -> OSError:
        if self._expired:
            return TimeoutError("the peer is too slow or silent")
        return ConnectionResetError("the peer closed the connection")
