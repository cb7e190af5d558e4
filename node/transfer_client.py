"""The receiving end of the data plane: fetches blocks over several streams at once.

Streams take blocks from one list, largest first, and ask for the next before the last has
come, so the pipe never runs dry. A stream whose connection breaks goes on where it was, over
the next address; it gives up after a bounded number of tries in a row without progress.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Event, Lock, Thread
from typing import Final

from fabric.block import BlockRef
from fabric.compression import link_bytes_per_s
from fabric.control import Address, LinkKind
from fabric.errors import CorruptDataError, FabricError, RetryLaterError
from fabric.ids import Fingerprint, NodeName
from fabric.limits import KIB, MIB, TRANSFER_STREAMS
from fabric.wire import FETCH_PARTS_MAX, FetchPart, FetchRequest, Goodbye
from node.channel import Channel
from node.payload import Allocate, Done, Landing, landings_of, receive_payload
from node.peer import Patience, Peer
from node.route import Route

REQUEST_BYTES: Final = 4 * MIB  # small blocks are asked for together
PROGRESS_BYTES: Final = 64 * KIB  # fewer are none: a peer may not drip us along for ever
WRONG_MAX: Final = 2  # a block that arrives wrong is fetched once more, from its start
WATCH_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a fetch moved."""

    blocks: int
    bytes: int
    seconds: float
    streams: int
    resumed: int  # blocks continued after a broken connection
    wire_bytes: int  # payload as it travelled: fewer where compressed, more where repeated


def fetch_blocks(  # noqa: PLR0913
    addresses: Sequence[Address],
    *,
    name: NodeName,
    source: NodeName,
    cluster_key: bytes,
    fingerprint: Fingerprint,
    ticket: bytes,
    refs: Sequence[BlockRef],
    allocate: Allocate,
    done: Done,
    streams: int = TRANSFER_STREAMS,
    cancel: Event | None = None,
    patience: Patience = Patience(),  # noqa: B008 - frozen
) -> TransferReport:
    """Fetch each distinct block of `refs` from node `source` into the buffers of `allocate`.

    `allocate` and then, with verified bytes, `done` are called once per block, from several
    threads at once; what they raise ends the fetch and is raised here. After an error no
    thread touches a buffer any more, and blocks already `done` stay done.
    """
    began_s = time.monotonic()
    landings = landings_of(refs)
    total_bytes = sum(landing.ref.payload_bytes for landing in landings)
    streams = max(1, min(streams, len(landings), ceil(total_bytes / REQUEST_BYTES)))
    if landings:
        peer = Peer(name, source, cluster_key, fingerprint, ticket, patience)
        _Fetch(peer, Route(addresses), landings, allocate, done).run(streams, cancel)
    return TransferReport(
        blocks=len(landings),
        bytes=total_bytes,
        seconds=time.monotonic() - began_s,
        streams=streams,
        resumed=sum(landing.was_cut for landing in landings),
        wire_bytes=sum(landing.wire_bytes for landing in landings),
    )


class _Fetch:
    """The list of blocks to come, and what the streams share."""

    def __init__(
        self,
        peer: Peer,
        route: Route,
        landings: Sequence[Landing],
        allocate: Allocate,
        done: Done,
    ) -> None:
        self.peer = peer
        self.route = route
        self.stopped = Event()
        self._allocate = allocate
        self._done = done
        self._lock = Lock()
        self._waiting = deque(landings)
        self._channels: set[Channel] = set()
        self._threads: list[Thread] = []
        self._running = 0
        self._over = Event()
        self._error: BaseException | None = None

    def run(self, streams: int, cancel: Event | None) -> None:
        """Run all streams to their end; raise the first error of any."""
        self._running = streams
        try:
            for number in range(streams):
                thread = Thread(target=self._stream, name=f"transfer-fetch-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._watch(cancel)
        except BaseException as interruption:  # noqa: BLE001 - raised once no thread is left
            self.fail(interruption)
        for thread in self._threads:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle would keep the buffers

    def fail(self, error: BaseException) -> None:
        """Stop every stream; the first error is the one to raise."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.stopped.set()
            channels = list(self._channels)
        for channel in channels:
            channel.cut()

    def take(self, *, ahead: bool) -> list[Landing]:
        """Take the next blocks; `ahead` of need only while there is plenty for all."""
        batch: list[Landing] = []
        batch_bytes = 0
        with self._lock:
            if ahead and len(self._waiting) <= self._running:
                return batch
            while self._waiting and len(batch) < FETCH_PARTS_MAX and batch_bytes < REQUEST_BYTES:
                batch.append(self._waiting.popleft())
                batch_bytes += batch[-1].ref.payload_bytes
        return batch

    @contextmanager
    def connected(self, address: Address) -> Iterator[Channel]:
        """Connect to an address of the peer; one that is not the peer's is dropped for good."""
        try:
            channel = self.peer.dial(address)
        except FabricError as error:
            self.route.exclude(address, error)
            raise ConnectionAbortedError(error.message) from error
        try:
            with self._lock:
                self._channels.add(channel)
                if self.stopped.is_set():
                    raise ConnectionAbortedError
            try:
                self.peer.greet(channel)
            except RetryLaterError:
                raise
            except FabricError as error:
                self.route.exclude(address, error)
                raise ConnectionAbortedError(error.message) from error
            yield channel
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def allocate(self, ref: BlockRef) -> memoryview:
        """Call the caller's `allocate`; its error ends the fetch and is no broken connection."""
        try:
            return self._allocate(ref)
        except Exception as error:
            self.fail(error)
            raise ConnectionAbortedError from error

    def done(self, landing: Landing) -> None:
        """Hand a verified block over, likewise."""
        assert landing.view is not None, "a complete block has its buffer"
        try:
            self._done(landing.ref, landing.view)
        except Exception as error:
            self.fail(error)
            raise ConnectionAbortedError from error
        landing.view = None

    def _watch(self, cancel: Event | None) -> None:
        while not self._over.wait(WATCH_S):
            if cancel is not None and cancel.is_set():
                self.fail(RetryLaterError("the transfer was cancelled", code="cancelled"))
            now_s = time.monotonic()
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                channel.expire(now_s)

    def _stream(self) -> None:
        try:
            _Stream(self).run()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self.fail(error)
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._over.set()


class _Stream:
    """One connection after another, and the blocks asked for on it."""

    def __init__(self, fetch: _Fetch) -> None:
        self._fetch = fetch
        self._backlog: deque[Landing] = deque()  # the first may be partly there
        self._done_count = 0
        self._tries = 0
        self._pause_s = fetch.peer.patience.pause_s

    def run(self) -> None:
        """Fetch until no block is left; raise once trying on is pointless."""
        fetch = self._fetch
        self._backlog.extend(fetch.take(ahead=False))
        while self._backlog and not fetch.stopped.is_set():
            address, has_failed = fetch.route.pick()
            if has_failed:
                fetch.stopped.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, fetch.peer.patience.pause_max_s)
            before = self._progress()
            try:
                with fetch.connected(address) as channel:
                    self._converse(channel, address)
            except CorruptDataError as error:
                self._arrived_wrong(error)
                self._failed(address, before, error)
            except (OSError, RetryLaterError) as error:
                self._failed(address, before, error)

    def _converse(self, channel: Channel, address: Address) -> None:
        asked = index = 0
        while True:
            if asked <= 1:
                self._backlog.extend(self._fetch.take(ahead=bool(self._backlog)))
                self._ask(channel, address, list(self._backlog)[asked:])
                asked = len(self._backlog)
            if not self._backlog:
                channel.send(Goodbye())
                return
            landing = self._backlog[0]
            receive_payload(channel, landing, index, self._fetch.allocate)
            landing.check()
            self._fetch.done(landing)
            self._backlog.popleft()
            self._done_count += 1
            asked -= 1
            index += 1

    def _ask(self, channel: Channel, address: Address, landings: list[Landing]) -> None:
        is_fast = address.kind in (LinkKind.LOOPBACK, LinkKind.THUNDERBOLT)
        link = 0 if is_fast else link_bytes_per_s(address)
        for first in range(0, len(landings), FETCH_PARTS_MAX):
            parts = tuple(
                FetchPart(landing.ref.block_hash, landing.ref.checksum, landing.filled)
                for landing in landings[first : first + FETCH_PARTS_MAX]
            )
            channel.send(FetchRequest(self._fetch.peer.ticket, parts, link))

    def _progress(self) -> tuple[int, int]:
        return self._done_count, self._backlog[0].filled if self._backlog else 0

    def _arrived_wrong(self, error: CorruptDataError) -> None:
        landing = self._backlog[0]
        landing.restart()
        landing.wrong_count += 1
        if landing.wrong_count >= WRONG_MAX:
            raise error

    def _failed(self, address: Address, before: tuple[int, int], error: Exception) -> None:
        fetch = self._fetch
        if fetch.stopped.is_set():
            return
        fetch.route.failed(address)
        done_count, filled = self._progress()
        if self._backlog and filled:
            self._backlog[0].was_cut = True
        if done_count > before[0] or filled - before[1] >= PROGRESS_BYTES:
            self._tries, self._pause_s = 0, fetch.peer.patience.pause_s
            return
        self._tries += 1
        if self._tries >= fetch.route.size * fetch.peer.patience.rounds:
            message = f"{fetch.peer.source} sends nothing over any of its addresses ({error})"
            raise RetryLaterError(message)
