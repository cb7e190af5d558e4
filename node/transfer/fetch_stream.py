"""One stream of a fetch: its successive connections over one link, and its requested ranges."""

from collections import deque
from collections.abc import Sequence

from fabric.errors import CorruptDataError, FabricError, RetryLaterError
from fabric.net.compression import zstd_may_save_time
from fabric.net.wire import FetchPart, FetchRequest
from node.net.channel import Channel
from node.net.connections import Connection
from node.transfer.fetch import Fetch
from node.transfer.fetch_links import FetchLink
from node.transfer.payload import receive_slice
from node.transfer.work_queue import FetchSlice


class FetchStream:
    """A thread of a fetch; the fetch's lock guards the public attributes."""

    def __init__(self, fetch: Fetch, link: FetchLink) -> None:
        self._fetch = fetch
        self.link = link
        self.queue: deque[FetchSlice] = deque()  # the first may have arrived in part
        self.channel: Channel | None = None
        self.is_conversing = False
        self.was_stolen_from = self.is_closed = False
        self.moved_bytes = 0
        self.failures_before = 0

    def run(self) -> None:
        """Connect and fetch repeatedly until the fetch is over."""
        is_first = True
        while self._fetch.await_turn(self, is_first=is_first):
            is_first = False
            connection = self._connect()
            if connection is not None:
                self._use(connection)

    def _connect(self) -> Connection | None:
        """Take an idle connection or dial one; a failure counts against the link."""
        fetch, peer, address = self._fetch, self._fetch.spec.peer, self.link.address
        connection = fetch.connections.take(peer, address)
        if connection is not None:
            return connection
        channel: Channel | None = None
        try:
            channel = peer.dial(address)
            fetch.register_channel(self, channel)
            peer.authenticate(channel)
        except (OSError, RetryLaterError) as error:
            fetch.handle_broken_stream(self, error, is_dialing=True)
        except FabricError as error:
            fetch.handle_refusal(self, error)
        else:
            fetch.connections.count("dialled")
            return Connection(channel)
        fetch.end(self)
        if channel is not None:
            channel.close()
        return None

    def _use(self, connection: Connection) -> None:
        fetch, is_sound = self._fetch, False
        try:
            if fetch.begin(self, connection):
                self._converse(connection)
            is_sound = not self.queue and not self.was_stolen_from
        except CorruptDataError as error:
            fetch.count_wrong_bytes(error)
            fetch.handle_broken_stream(self, error, is_dialing=False)
        except (OSError, RetryLaterError) as error:
            fetch.handle_broken_stream(self, error, is_dialing=False)
        finally:
            self.queue.clear()
            # Kept before the fetch may return, so that the next fetch finds it.
            if is_sound:
                fetch.connections.keep(fetch.spec.peer, self.link.address, connection)
            fetch.end(self)
            if not is_sound:
                connection.channel.close()

    def _converse(self, connection: Connection) -> None:
        fetch, channel = self._fetch, connection.channel
        is_ahead = False
        while is_ahead or (pieces := fetch.next_pieces(self)) is not None:
            if not is_ahead and pieces:
                self._send_request(channel, pieces)
            piece = self.queue[0]
            head = receive_slice(
                channel,
                connection.received,
                piece.offset,
                piece.left_bytes,
                lambda: piece.block.place(fetch.allocate),  # noqa: B023 - called at once
                is_last=len(self.queue) == 1,
            )
            piece.block.hash_ahead(head.offset, head.length)
            complete = fetch.count_received(self, head)
            if not piece.left_bytes:
                self.queue.popleft()
                connection.received += 1
            # Python code between two slices costs as much as a tenth of a slice.
            is_ahead = len(self.queue) > 1 and bool(piece.left_bytes)
            if complete is not None:
                fetch.finish(complete)
        if self.was_stolen_from or self.queue:
            raise ConnectionAbortedError

    def _send_request(self, channel: Channel, pieces: Sequence[FetchSlice]) -> None:
        spec = self._fetch.spec
        link = int(self.link.expected)
        parts = tuple(
            FetchPart(x.block.ref.block_hash, x.block.ref.checksum, x.offset, x.left_bytes)
            for x in pieces
        )
        link = link if zstd_may_save_time(link) else 0
        channel.send(FetchRequest(spec.ticket, parts, link, spec.urgency))
