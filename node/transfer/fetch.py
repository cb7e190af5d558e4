"""One fetch: the state its streams share, the assignment of ranges, and its end.

Ranges are assigned by speed: a stream gets a moment's worth, less near the end. A stream that
runs out of work takes over the ranges of a much slower link.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import Final, Protocol

from fabric.errors import CorruptDataError, FabricError, RetryLaterError
from fabric.kvcache.block_chain import BlockRef
from fabric.net.wire import FETCH_PARTS_MAX, PayloadHead, Urgency
from node.limits import TRANSFER_RANGE_BYTES_MIN, TRANSFER_REQUEST_BYTES, TRANSFER_WRONG_MAX
from node.net.channel import Channel
from node.net.connections import Connection, Connections
from node.net.frame_mac import TamperedError
from node.net.peer import Peer
from node.transfer.fetch_links import PROGRESS_BYTES, FetchLink, FetchLinks
from node.transfer.work_queue import Allocate, Done, FetchSlice, FetchWork, PendingBlock

WATCH_S: Final = 0.05
IDLE_S: Final = 0.01  # how often a stream without work looks for a straggler
REQUEST_S: Final = 0.2  # worth of ranges that a stream requests at once
SHARE_TAKEN: Final = 0.75  # part of a stream's share; the rest evens out errors of the speeds
STRAGGLE_S: Final = 0.02  # a shorter delay is not worth a broken connection
MUCH_FASTER: Final = 2.0


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """Peer, ticket and urgency of a fetch, and where its bytes go."""

    peer: Peer
    ticket: bytes
    urgency: Urgency
    allocate: Allocate
    done: Done


class Stream(Protocol):
    """Interface of a stream; `queue` holds the requested ranges that have not arrived."""

    link: FetchLink
    queue: deque[FetchSlice]
    channel: Channel | None
    is_conversing: bool
    was_stolen_from: bool
    is_closed: bool  # set by the watcher, before its thread notices
    moved_bytes: int  # bytes over the present connection
    failures_before: int  # the link's failures at the start of this connection

    def run(self) -> None:
        """Fetch ranges until the fetch is over."""
        ...


class Fetch:
    """State that all streams of one fetch share, guarded by one lock."""

    def __init__(
        self, spec: FetchSpec, links: FetchLinks, work: FetchWork, connections: Connections
    ) -> None:
        self.spec = spec
        self.links = links
        self.work = work
        self.connections = connections
        self.is_over = False
        self._changed = Condition()
        self._streams: list[Stream] = []
        self._error: BaseException | None = None
        self._wrong_count = 0

    def run(self, streams: Sequence[Stream], cancel: Event | None) -> None:
        """Run all streams to their end; raise the first error."""
        self._streams = list(streams)
        try:
            for number, stream in enumerate(streams):
                name = f"transfer-fetch-{number}"
                Thread(target=self._run_stream, args=(stream,), name=name, daemon=True).start()
            with self._changed:
                while not self.is_over:
                    self._changed.wait(WATCH_S)
                    self._watch(cancel)
        except BaseException as interruption:  # noqa: BLE001 - raised once all streams have ended
            self.fail(interruption)
        with self._changed:
            # A stream that is only connecting holds no range and ends by itself.
            for stream in self._streams:
                if stream.channel is not None and not stream.is_conversing:
                    stream.channel.cut()
            self._changed.wait_for(lambda: not any(s.is_conversing for s in self._streams))
            self._report(time.monotonic(), is_last=True)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle would keep the buffers

    def fail(self, error: BaseException) -> None:
        """Stop every stream; the first error is raised by `run`."""
        with self._changed:
            if not self.is_over:
                self._error = error
            self.is_over = True
            for stream in self._streams:
                if stream.channel is not None:
                    stream.channel.cut()
            self._changed.notify_all()

    # --- connections of a stream ----------------------------------------------------------------

    def await_turn(self, stream: Stream, *, is_first: bool) -> bool:
        """Wait until `stream` should connect; return False once it no longer should."""
        link = stream.link
        with self._changed:
            while not self.is_over and link in self.links.links:
                now_s = time.monotonic()
                has_work = is_first or (self.work.waiting_bytes and self._helps(stream, now_s))
                if has_work and self.links.may_dial(link, now_s):
                    link.dialing += 1
                    stream.failures_before = link.failed_count
                    stream.moved_bytes, stream.is_closed = 0, False
                    return True
                self._changed.wait(WATCH_S)
        return False

    def register_channel(self, stream: Stream, channel: Channel) -> None:
        """Register a channel with the watcher before its handshake begins."""
        with self._changed:
            if self.is_over:
                raise ConnectionAbortedError
            stream.channel = channel

    def begin(self, stream: Stream, connection: Connection) -> bool:
        """Begin requests over an authenticated connection; return False if the fetch is over."""
        with self._changed:
            stream.channel = connection.channel
            stream.link.dialing -= 1
            stream.is_conversing = not self.is_over
            return stream.is_conversing

    def end(self, stream: Stream) -> None:
        """Mark `stream` as ended: it no longer writes to any buffer."""
        with self._changed:
            stream.is_conversing = False
            stream.channel = None
            self._changed.notify_all()

    def handle_broken_stream(self, stream: Stream, error: Exception, *, is_dialing: bool) -> None:
        """Give back a broken stream's ranges; count a failure unless it was cut for being slow."""
        counted = self.connections.count
        with self._changed:
            now_s, link = time.monotonic(), stream.link
            link.dialing -= is_dialing
            if stream.queue:
                link.end(now_s)
            self.work.give_back(list(stream.queue), cut=True)
            self._changed.notify_all()
            if self.is_over:
                return
            if stream.was_stolen_from:
                stream.was_stolen_from = False
                return
            counted("tampered" if isinstance(error, TamperedError) else "broken")
            if link.failed_count == stream.failures_before:  # else another stream has reported it
                self.links.failed(link, error, now_s)
            failure = self.links.error_if_exhausted()
        if failure is not None:
            self.fail(failure)

    def handle_refusal(self, stream: Stream, refusal: FabricError) -> None:
        """Exclude a link whose other end is not the peer."""
        self.connections.count(f"refused_{refusal.code}")
        with self._changed:
            stream.link.dialing -= 1
            self.links.exclude(stream.link, refusal)
            failure = self.links.error_if_exhausted()
        if failure is not None:
            self.fail(failure)

    def count_wrong_bytes(self, error: CorruptDataError) -> None:
        """Count unrequested bytes from an authenticated peer; fail the second time."""
        self.connections.count("corrupt")
        self._wrong_count += 1
        if self._wrong_count >= TRANSFER_WRONG_MAX:
            self.fail(error)

    # --- ranges of a stream ---------------------------------------------------------------------

    def next_pieces(self, stream: Stream) -> list[FetchSlice] | None:
        """Return the ranges to request now, after waiting for some; None once the fetch is over."""
        with self._changed:
            while not self.is_over and not stream.was_stolen_from:
                now_s = time.monotonic()
                pieces = self._assign(stream, now_s)
                if pieces and not stream.queue:
                    stream.link.begin(now_s)
                stream.queue.extend(pieces)
                if stream.queue:
                    return pieces
                self._steal_work(stream, now_s)
                self._changed.wait(IDLE_S)
        return None

    def allocate(self, ref: BlockRef) -> memoryview:
        """Call the caller's `allocate`; its error ends the fetch, not the connection."""
        try:
            return self.spec.allocate(ref)
        except Exception as error:
            self.fail(error)
            raise ConnectionAbortedError from error

    def count_received(self, stream: Stream, head: PayloadHead) -> PendingBlock | None:
        """Count a slice of the first range in the stream's queue; return the block it completes."""
        with self._changed:
            now_s, link, piece = time.monotonic(), stream.link, stream.queue[0]
            is_complete = self.work.count_received(piece, head.length)
            stream.moved_bytes += head.length
            self.links.moved(link, head.wire_bytes, now_s)
            if stream.moved_bytes >= PROGRESS_BYTES or not piece.left_bytes:
                link.failures = 0
            if not piece.left_bytes and len(stream.queue) == 1:
                link.end(now_s)
        return piece.block if is_complete else None

    def finish(self, block: PendingBlock) -> None:
        """Verify a complete block and pass it on; end the fetch with the last one."""
        try:
            view = block.check()
        except CorruptDataError as error:
            self.connections.count("corrupt")
            with self._changed:
                is_over = not self.work.restart(block)
                self._changed.notify_all()
            if is_over:
                self.fail(error)
            return
        try:
            self.spec.done(block.ref, view)
        except Exception as error:
            self.fail(error)
            raise ConnectionAbortedError from error
        with self._changed:
            self.work.open_blocks -= 1
            if not self.work.open_blocks:
                self.is_over = True
                self._changed.notify_all()

    # --- with the lock held ---------------------------------------------------------------------

    def _assign(self, stream: Stream, now_s: float) -> list[FetchSlice]:
        """Take ranges worth REQUEST_S, at the end at most SHARE_TAKEN of the stream's share."""
        if not self.work.waiting_bytes:
            return []
        speed = stream.link.stream_bytes_per_s(now_s)
        want = min(speed * REQUEST_S, TRANSFER_REQUEST_BYTES)
        queued = sum(piece.left_bytes for piece in stream.queue)
        if queued > want or not self._helps(stream, now_s):
            return []
        active = sum(
            other.link.stream_bytes_per_s(now_s)
            for other in self._streams
            if other.is_conversing or (other.link is not stream.link and other.link.is_awaited)
        )
        share = self.work.waiting_bytes * speed / max(active, speed) * SHARE_TAKEN
        most = max(TRANSFER_RANGE_BYTES_MIN, int(min(want, share)))
        pieces: list[FetchSlice] = []
        left = most
        while (
            left > 0
            and len(pieces) < FETCH_PARTS_MAX
            and (piece := self.work.take(max(left, TRANSFER_RANGE_BYTES_MIN)))
        ):
            pieces.append(piece)
            left -= piece.left_bytes
        return pieces

    def _helps(self, stream: Stream, now_s: float) -> bool:
        """Return whether `stream` would fetch a range before faster ones finish everything."""
        mine = stream.link.stream_bytes_per_s(now_s)
        faster = sum(
            speed
            for other in self._streams
            if other.is_conversing
            and (speed := other.link.stream_bytes_per_s(now_s)) > MUCH_FASTER * mine
            and not self._is_silent(other, now_s)
        )
        smallest = min(TRANSFER_RANGE_BYTES_MIN, self.work.waiting_bytes)
        return not faster or smallest / mine <= self.work.missing_bytes / faster

    def _steal_work(self, stream: Stream, now_s: float) -> None:
        """Cut the connection that would be the last to finish if `stream` is much faster."""
        mine = stream.link.stream_bytes_per_s(now_s)
        worst, worst_s = None, 0.0
        for other in self._streams:
            if other is stream or not other.queue or other.is_closed or not other.is_conversing:
                continue
            left_bytes = sum(piece.left_bytes for piece in tuple(other.queue))
            left_s = left_bytes / other.link.stream_bytes_per_s(now_s)
            if self._is_silent(other, now_s):
                left_s = float("inf")
            elif other.link is stream.link or left_s < MUCH_FASTER * left_bytes / mine + STRAGGLE_S:
                continue
            if left_s > worst_s:
                worst, worst_s = other, left_s
        if worst is not None:
            worst.was_stolen_from = worst_s < float("inf")
            self._cut(worst, "overtaken" if worst.was_stolen_from else "silent")

    def _cut(self, stream: Stream, why: str) -> None:
        if stream.channel is not None:
            self.connections.count(why)
            stream.is_closed = True
            stream.channel.cut()

    def _is_silent(self, stream: Stream, now_s: float) -> bool:
        if stream.channel is None:
            return False
        return stream.channel.silence_s(now_s) > self.spec.peer.timeouts.silence_s

    def _watch(self, cancel: Event | None) -> None:
        if cancel is not None and cancel.is_set():
            self.fail(RetryLaterError("the transfer was cancelled", code="cancelled"))
        now_s, timeouts = time.monotonic(), self.spec.peer.timeouts
        for stream in self._streams:
            channel = stream.channel
            if channel is None or stream.is_closed or channel.expire(now_s):
                continue
            silence_s = channel.silence_s(now_s)
            is_outpaced = self._is_silent(stream, now_s) and any(
                now_s - other.moved_s < timeouts.silence_s
                for other in self.links.links
                if other is not stream.link
            )
            if is_outpaced or silence_s > timeouts.silence_alone_s:
                self._cut(stream, "silent")
        self._report(now_s)

    def _report(self, now_s: float, *, is_last: bool = False) -> None:
        # Prefetches yield to other transfers, so their speed does not measure the link.
        if self.spec.urgency is not Urgency.PREFETCH:
            self.links.report(now_s, last=is_last)

    def _run_stream(self, stream: Stream) -> None:
        try:
            stream.run()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self.fail(error)
        finally:
            self.end(stream)
