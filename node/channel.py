"""One data-plane connection: bounded frames and payload slices, each under a deadline.

Sockets block, so that one system call moves megabytes without coming back for the GIL: next
to a busy Python thread every return costs up to 5 ms. Deadlines are kept by whoever watches
(`expire`), which shuts the socket down and so wakes the blocked call.
"""

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final

from fabric.errors import FabricError
from fabric.limits import KIB, MIB
from fabric.wire import HEAD_BYTES, Message, decode_body, decode_head, encode_frame, refusal_of

SLICE_BYTES_MIN: Final = 256 * KIB  # in 30 s of patience: 9 kB/s is the slowest link served
SLICE_BYTES_MAX: Final = 4 * MIB
SLICE_FAST_S: Final = 0.25  # a slice faster than this is doubled, a slower one halved
LINGER_S: Final = 0.5
LINGER_BYTES: Final = 64 * KIB


class Channel:
    """A connected socket; used by one thread, watched and cut by another."""

    def __init__(self, sock: socket.socket, now_s: Callable[[], float], patience_s: float) -> None:
        """Take over `sock`; `patience_s` bounds one frame or one payload slice."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._now_s = now_s
        self._patience_s = patience_s
        self._deadline_s = math.inf  # set while blocked only: between calls nobody is late
        self._is_hurried = False
        self._expired = False
        self._closing = Lock()  # a descriptor must not be shut down after it was reused
        self._slice_bytes = SLICE_BYTES_MIN

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

    def cut(self) -> None:
        """Wake whoever is blocked on this connection with an error."""
        with self._closing, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with self._closing:
            self._sock.close()

    def send(self, *messages: Message) -> None:
        """Send messages in one go."""
        raw = b"".join(encode_frame(message) for message in messages)
        with self._timed():
            self._sock.sendall(raw)

    def receive(self, *expected: type[Message]) -> Message:
        """Receive one of `expected`; raise RejectedError for anything else."""
        with self._timed():
            head = decode_head(bytes(self._receive_exactly(HEAD_BYTES)), expected)
            return decode_body(head, bytes(self._receive_exactly(head.body_bytes)))

    def receive_bytes(self, count: int) -> bytearray:
        """Receive `count` bytes; the caller has bounded it."""
        with self._timed():
            return self._receive_exactly(count)

    def receive_slice(self, view: memoryview) -> int:
        """Receive at least one byte of `view` and at most one slice; return how many."""
        part = view[: self._slice_bytes]
        with self._timed(adapt=True):
            count = self._sock.recv_into(part, len(part), socket.MSG_WAITALL)
        if not count:
            raise self._ended()
        return count

    def send_slices(self, view: memoryview) -> None:
        """Send all of `view`, slice by slice."""
        sent = 0
        while sent < len(view):
            # Released even on errors: a mapping cannot close under a view of it.
            with view[sent : sent + self._slice_bytes] as part, self._timed(adapt=True):
                self._sock.sendall(part)
                sent += len(part)

    def refuse(self, error: FabricError) -> None:
        """Say why, and let the peer read it: closing over unread bytes would destroy it."""
        self.hurry(LINGER_S)
        with suppress(OSError):
            self._sock.sendall(encode_frame(refusal_of(error)))
            self._sock.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            while left > 0 and (chunk := self._sock.recv(left)):
                left -= len(chunk)

    @contextmanager
    def _timed(self, *, adapt: bool = False) -> Iterator[None]:
        started_s = self._now_s()
        if not self._is_hurried:
            self._deadline_s = started_s + self._patience_s
        try:
            yield
        finally:
            if not self._is_hurried:
                self._deadline_s = math.inf
        if not adapt:
            return
        if self._now_s() - started_s < SLICE_FAST_S:
            self._slice_bytes = min(self._slice_bytes * 2, SLICE_BYTES_MAX)
        else:
            self._slice_bytes = max(self._slice_bytes // 2, SLICE_BYTES_MIN)

    def _receive_exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            got = self._sock.recv_into(view[filled:], count - filled, socket.MSG_WAITALL)
            if not got:
                raise self._ended()
            filled += got
        return buffer

    def _ended(self) -> OSError:
        if self._expired:
            return TimeoutError("the peer is too slow or silent")
        return ConnectionResetError("the peer closed the connection")
