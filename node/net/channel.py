"""One data-plane connection: bounded frames and payload slices, each under a deadline and a MAC.

Sockets block, so that one system call moves a whole slice without taking the GIL again, which next
to a busy Python thread costs up to 5 ms. A watching thread enforces deadlines (`expire`): it shuts
the socket down and so wakes the blocked call. A receive returns early with the bytes that have
arrived, so that the watcher can tell a slow link from a dead one.
"""

import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Final

from fabric.codec import pack
from fabric.errors import FabricError, RejectedError
from fabric.limits import KIB, TRANSFER_SLICE_BYTES_MAX
from fabric.net.wire import (
    HEAD_BYTES,
    MAC_BYTES,
    FrameHead,
    Message,
    PayloadHead,
    decode_body,
    decode_head,
    encode_frame,
    refusal_of,
)
from node.limits import TRANSFER_SLICE_BYTES_MIN
from node.net.addresses import is_on_cable
from node.net.frame_mac import FrameSeal, TamperedError

SLICE_FAST_S: Final = 0.25  # a slice faster than this is doubled, a slower one halved
SLICE_IDLE_S: Final = (
    0.001  # after such a wait slices start small, so that the first bytes leave earlier
)
LINGER_S: Final = 0.5
LINGER_BYTES: Final = 64 * KIB
TICK_S: Final = 0.25  # a receive in progress reports its bytes at least so often
_ROOM_BYTES: Final = 512  # room before a slice for its head
_BUFFER_BYTES: Final = _ROOM_BYTES + TRANSFER_SLICE_BYTES_MAX + MAC_BYTES
# Received together with a slice that another follows: most of its head, so that a slice costs one
# return to Python instead of three. Not more than is certain to arrive, or the receive would wait.
AHEAD_BYTES: Final = HEAD_BYTES + len(pack(PayloadHead(0, 0, 1, 1))) + 2 * MAC_BYTES
_TICK = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1_000_000))


class Channel:
    """A connected socket, used by one thread; another watches and cuts it."""

    def __init__(self, sock: socket.socket, now_s: Callable[[], float], timeout_s: float) -> None:
        """Take over `sock`; `timeout_s` bounds one frame or one payload slice."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        self._sock = sock
        self._now_s = now_s
        self._timeout_s = timeout_s
        self._deadline_s = math.inf  # set only while blocked: between calls there is no deadline
        self._silent_since_s = math.inf  # set only while blocked
        self._is_hurried = False
        self._expired = False
        self._closing = Lock()  # a reused descriptor must not be shut down
        self._outgoing: FrameSeal | None = None
        self._incoming: FrameSeal | None = None
        self._ahead = b""  # received, not yet parsed
        self._buffer = memoryview(b"")
        self._sealed_bytes = memoryview(b"")  # slices as they travel, if encrypted
        self._slice_bytes = TRANSFER_SLICE_BYTES_MIN

    @property
    def slice_bytes(self) -> int:
        """Bytes to send under one MAC now."""
        return self._slice_bytes

    def seal(self, outgoing: bytes, incoming: bytes, *, encrypts: bool) -> None:
        """Authenticate, or encrypt, everything from now on; each direction has its own key."""
        self._outgoing = FrameSeal(outgoing, encrypts=encrypts)
        self._incoming = FrameSeal(incoming, encrypts=encrypts)

    def set_deadline(self, seconds: float) -> None:
        """Set one deadline for all frames and slices until `clear_deadline`."""
        self._deadline_s = self._now_s() + seconds
        self._is_hurried = True

    def clear_deadline(self) -> None:
        """Clear the common deadline; each frame and slice has its own timeout again."""
        self._is_hurried = False
        self._deadline_s = math.inf

    def expire(self, now_s: float) -> bool:
        """Cut the connection if its deadline has passed; called by the watching thread."""
        if now_s <= self._deadline_s:
            return False
        self._expired = True
        self.cut()
        return True

    def silence_s(self, now_s: float) -> float:
        """Return the seconds for which a receive has waited without a byte; 0 while none waits."""
        return max(0.0, now_s - self._silent_since_s)

    def cut(self) -> None:
        """Shut down the connection, which wakes a blocked call with an error."""
        with self._closing, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            self._sock.close()

    def is_on_cable(self) -> bool:
        """Return whether everything sent here leaves through a Thunderbolt cable."""
        return is_on_cable(self._sock)

    def local_host(self) -> str:
        """Return this end's address, which identifies the link."""
        return str(self._sock.getsockname()[0])

    def is_quiet(self) -> bool:
        """Return whether the peer has sent no unrequested bytes and has not disconnected."""
        if self._ahead:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, *messages: Message) -> None:
        """Send messages in one write."""
        raw = b"".join(self._seal_frame(encode_frame(message)) for message in messages)
        self._send_all(raw)

    def receive(self, *expected: type[Message]) -> Message:
        """Receive one of `expected`; raise RejectedError or TamperedError for anything else."""
        mac_bytes = 0 if self._incoming is None else MAC_BYTES
        started_s = self._start()
        try:
            raw = self._receive_exactly(HEAD_BYTES)
            if self._now_s() - started_s > SLICE_IDLE_S:
                self._slice_bytes = TRANSFER_SLICE_BYTES_MIN
            head = self._decode_head(raw, expected)
            body = self._receive_exactly(head.body_bytes + mac_bytes)
        finally:
            self._stop()
        if self._incoming is None:
            return decode_body(head, body)
        return decode_body(head, self._incoming.opened_frame(raw, body))

    def receive_slice(self, view: memoryview, *, is_followed: bool = False) -> None:
        """Fill `view` with a payload slice; raise TamperedError if it is not the peer's.

        `is_followed`: another was requested, so its head follows this one.
        """
        assert self._incoming is not None, "payload travels after the handshake"
        if self._incoming.encrypts:
            sealed = self._scratch(len(view))[: len(view) + MAC_BYTES]
            self._receive_parts(sealed[: len(view)], sealed[len(view) :], is_followed=is_followed)
            self._incoming.open_slice(sealed, view)
        else:
            mac = memoryview(bytearray(MAC_BYTES))
            self._receive_parts(view, mac, is_followed=is_followed)
            self._incoming.check_slice(view, mac)

    def _receive_parts(self, view: memoryview, mac: memoryview, *, is_followed: bool) -> None:
        early = self._ahead[: len(view)]
        view[: len(early)], self._ahead = early, self._ahead[len(early) :]
        tail = memoryview(bytearray(MAC_BYTES + AHEAD_BYTES * is_followed))
        filled, wanted = len(early), len(view) + MAC_BYTES
        got = min(len(self._ahead), MAC_BYTES)
        tail[:got], self._ahead = self._ahead[:got], self._ahead[got:]
        filled += got
        self._start()
        try:
            while filled < wanted:
                rest = max(0, filled - len(view))
                views = [tail[rest:]] if filled >= len(view) else [view[filled:], tail]
                filled += self._receive_some(views)
        finally:
            self._stop()
        self._ahead += bytes(tail[MAC_BYTES : max(MAC_BYTES, filled - len(view))])
        mac[:] = tail[:MAC_BYTES]

    def room(self, length: int) -> memoryview:
        """Return the buffer for the next slice."""
        if not self._buffer:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        return self._buffer[_ROOM_BYTES : _ROOM_BYTES + length]

    def _scratch(self, slice_bytes: int) -> memoryview:
        """Return the buffer for an encrypted slice."""
        wanted = _ROOM_BYTES + slice_bytes + MAC_BYTES
        if len(self._sealed_bytes) < wanted:
            self._sealed_bytes = memoryview(bytearray(wanted))
        return self._sealed_bytes

    def send_slice(self, head: PayloadHead) -> None:
        """Send the first `head.wire_bytes` of `room` as the slice that `head` announces."""
        assert self._outgoing is not None, "payload travels after the handshake"
        raw = self._seal_frame(encode_frame(head))
        start, end = _ROOM_BYTES - len(raw), _ROOM_BYTES + head.wire_bytes
        # Encrypted into another buffer: the library does not promise to encrypt in place.
        out = self._scratch(head.wire_bytes) if self._outgoing.encrypts else self._buffer
        self._outgoing.slice(self._buffer[_ROOM_BYTES:end], out[_ROOM_BYTES : end + MAC_BYTES])
        out[start:_ROOM_BYTES] = raw
        seconds = self._send_all(out[start : end + MAC_BYTES])
        if seconds < SLICE_FAST_S:
            self._slice_bytes = min(self._slice_bytes * 2, TRANSFER_SLICE_BYTES_MAX)
        else:
            self._slice_bytes = max(self._slice_bytes // 2, TRANSFER_SLICE_BYTES_MIN)

    def refuse(self, error: FabricError) -> None:
        """Send the reason, and wait until the peer has read it: an early close discards it."""
        self.set_deadline(LINGER_S)
        with suppress(OSError):
            self._sock.sendall(self._seal_frame(encode_frame(refusal_of(error))))
            self._sock.shutdown(socket.SHUT_WR)
            left, view = LINGER_BYTES, memoryview(bytearray(LINGER_BYTES))
            while left > 0:
                left -= self._receive_some([view[:left]])

    # Not a context manager: between two slices Python code finds the processor's caches cold.
    def _start(self) -> float:
        started_s = self._now_s()
        if not self._is_hurried:
            self._deadline_s = started_s + self._timeout_s
        return started_s

    def _stop(self) -> None:
        self._silent_since_s = math.inf
        if not self._is_hurried:
            self._deadline_s = math.inf

    def _send_all(self, raw: bytes | memoryview) -> float:
        started_s = self._start()
        try:
            self._sock.sendall(raw)
        finally:
            self._stop()
        return self._now_s() - started_s

    def _seal_frame(self, frame: bytes) -> bytes:
        return frame if self._outgoing is None else self._outgoing.frame(frame)

    def _decode_head(self, raw: bytes, expected: tuple[type[Message], ...]) -> FrameHead:
        try:
            return decode_head(raw, expected)
        except RejectedError as error:
            if self._incoming is None:
                raise
            message = f"no authenticated peer sends this: {error.message}"
            raise TamperedError(message) from None

    def _receive_exactly(self, count: int) -> bytes:
        early = self._ahead[:count]
        self._ahead = self._ahead[count:]
        if len(early) == count:
            return early
        buffer = bytearray(count)
        buffer[: len(early)] = early
        view, filled = memoryview(buffer), len(early)
        while filled < count:
            filled += self._receive_some([view[filled:]])
        return bytes(buffer)

    def _receive_some(self, views: list[memoryview]) -> int:
        """Receive at least one byte."""
        if self._silent_since_s == math.inf:
            self._silent_since_s = self._now_s()
        while True:
            try:
                count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # no bytes for one tick
                if self._expired:
                    raise self._end_error() from None
                continue
            if not count:
                raise self._end_error()
            self._silent_since_s = self._now_s()
            return count

    def _end_error(self) -> OSError:
        if self._expired:
            return TimeoutError("the peer is too slow or silent")
        return ConnectionResetError("the peer closed the connection")
