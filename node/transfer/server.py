"""The sending end of the data plane, which streams offered blocks to nodes with a ticket.

One thread per connection, because a blocking send of megabytes is the cheapest way to move
them; one more thread accepts, and cuts connections whose deadline has passed.
"""

import logging
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from threading import Lock, Thread
from typing import Final, Protocol

from fabric.errors import (
    ConflictError,
    CorruptDataError,
    FabricError,
    NotFoundError,
    RejectedError,
    RetryLaterError,
    UnauthorizedError,
)
from fabric.hosting.turn_context import begin_turn
from fabric.ids import Fingerprint, NodeName
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import HANDSHAKE_TIMEOUT_S
from fabric.net.handshake import HandshakeRole, check_proof, prove, session_keys
from fabric.net.interfaces import Interface
from fabric.net.links import Address
from fabric.net.wire import (
    NONCE_BYTES,
    Challenge,
    FetchPart,
    FetchRequest,
    Goodbye,
    Hello,
    PeerCall,
    PeerReply,
    Ping,
    Probe,
    Proof,
)
from fabric.ports import Clock
from fabric.settings import AUTO
from node.limits import TRANSFER_CONNECTIONS_MAX, TRANSFER_TIMEOUT_S, TRANSFER_WAKES_MAX
from node.net.addresses import local_addresses
from node.net.channel import Channel
from node.net.frame_mac import TamperedError
from node.net.interfaces import MACHINE
from node.net.listeners import EVERYWHERE, Listeners
from node.net.peer import must_encrypt
from node.net.probe import LinkAnswers
from node.store.descriptors import Payload
from node.transfer.offer_book import OfferBook
from node.transfer.payload import Compressor, send_range
from node.transfer.urgency_gate import Sender, UrgencyGate

WATCH_S: Final = 0.1
_LOG = logging.getLogger(__name__)


class BlockSource(Protocol):
    """Source of the payloads of blocks."""

    def open_payload(self, ref: BlockRef) -> Payload:
        """Open a block's bytes, which the caller closes.

        Raises NotFoundError or CorruptDataError; both reach the peer as such.
        """
        ...


class TransferServer:
    """Server of the data plane; `offers` holds what peers may fetch."""

    def __init__(  # noqa: PLR0913
        self,
        name: NodeName,
        cluster_key: bytes,
        fingerprint: Fingerprint,
        blocks: BlockSource,
        clock: Clock,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        encrypt_links: str = AUTO,
        connections_max: int = TRANSFER_CONNECTIONS_MAX,
        handshake_s: float = HANDSHAKE_TIMEOUT_S,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Listen on `host`, an address of this machine or EVERYWHERE, and start accepting."""
        self._name = name
        self._cluster_key = cluster_key
        self._fingerprint = fingerprint
        self._blocks = blocks
        self._clock = clock
        self._encrypt_links = encrypt_links
        self._gate = UrgencyGate(clock.monotonic_s)
        self._connections_max = connections_max
        self._handshake_s = handshake_s
        self._timeout_s = timeout_s
        self.offers = OfferBook(name, cluster_key, clock)
        # Answers a call of another node, on the thread of its connection.
        self.answer_call: Callable[[bytes, NodeName], bytes] = _refuse_call
        self._measured = LinkAnswers(self._gate.is_busy)
        self._lock = Lock()
        self._connections: dict[Channel, Thread] = {}  # oldest first
        self._authenticated: set[Channel] = set()
        self._answering: set[Channel] = set()
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._interfaces = MACHINE.current()
        self._listeners = Listeners(host, port)
        self._listeners.follow(self._interfaces)
        self._waker, self._wake = socket.socketpair()
        self._acceptor = Thread(target=self._accept_all, name="transfer-accept", daemon=True)
        self._acceptor.start()

    def addresses(self) -> tuple[Address, ...]:
        """Return the addresses at which peers reach this server, fastest link first."""
        listeners = self._listeners
        only = None if listeners.host == EVERYWHERE else listeners.host
        return local_addresses(listeners.port, only, self._interfaces)

    def follow(self, interfaces: Sequence[Interface]) -> None:
        """Listen on these interfaces and advertise them."""
        self._interfaces = tuple(interfaces)
        with suppress(OSError):  # stopped in the meantime
            self._wake.send(b"i")

    def counts(self) -> dict[str, int]:
        """Count connections, parts of blocks, bytes and refusals by code since the start."""
        with self._lock:
            return dict(self._counts)

    @property
    def is_sending(self) -> bool:
        """Whether parts of blocks are being sent to a peer."""
        return bool(self._answering)

    def stop(self) -> None:
        """Stop listening, cut every connection and wait for its thread."""
        with self._lock:
            self._stopping = True
        with suppress(OSError):
            self._wake.send(b"x")
        self._acceptor.join()
        with self._lock:
            connections = dict(self._connections)
        for channel in connections:
            channel.cut()
        for thread in connections.values():
            thread.join()
        self._wake.close()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector, self._waker, closing(self._listeners):
            selector.register(self._waker, selectors.EVENT_READ)
            listening: set[socket.socket] = set()
            while not self._stopping:
                self._listeners.follow(self._interfaces)
                listening = _watch(selector, listening, set(self._listeners.sockets))
                for key, _ in selector.select(WATCH_S if self._connections else None):
                    if key.fileobj is self._waker:
                        self._waker.recv(TRANSFER_WAKES_MAX)
                    else:
                        assert isinstance(key.fileobj, socket.socket), "all that is watched"
                        self._accept_one(key.fileobj)
                now_s = self._clock.monotonic_s()
                with self._lock:
                    channels = list(self._connections)
                for channel in channels:
                    channel.expire(now_s)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # no connection, or closed already
            return
        except OSError:
            _LOG.warning("cannot accept a transfer connection", exc_info=True)
            time.sleep(WATCH_S)  # out of descriptors: the listener stays readable
            return
        try:
            channel = Channel(sock, self._clock.monotonic_s, self._timeout_s)
        except OSError:  # macOS, where the peer has hung up already
            sock.close()
            return
        channel.set_deadline(self._handshake_s)
        with self._lock:
            self._counts["connections"] += 1
            if self._make_room():
                thread = Thread(target=self._serve, args=(channel,), name="transfer-send")
                thread.daemon = True
                self._connections[channel] = thread
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread left
                    del self._connections[channel]
                else:
                    return
        channel.close()

    def _make_room(self) -> bool:
        """Evict unauthenticated, then idle connections, so that silent ones cannot block peers."""
        if len(self._connections) < self._connections_max:
            return True
        self._counts["refused_overloaded"] += 1
        unknown = (channel for channel in self._connections if channel not in self._authenticated)
        idle = (channel for channel in self._connections if channel not in self._answering)
        oldest = next(unknown, None) or next(idle, None)
        if oldest is None:
            return False
        oldest.cut()
        del self._connections[oldest]
        return True

    def _serve(self, channel: Channel) -> None:
        try:
            peer = self._handshake(channel)
            with self._lock:
                self._authenticated.add(channel)
            channel.clear_deadline()
            index, compressor = 0, Compressor()
            expected = (FetchRequest, Ping, Probe, PeerCall, Goodbye)
            while not isinstance(request := channel.receive(*expected), Goodbye):
                if isinstance(request, Ping | Probe):
                    self._measured.answer(channel, request)
                    continue
                if isinstance(request, PeerCall):
                    self._count("calls")
                    channel.send(PeerReply(self.answer_call(request.body, peer)))
                    continue
                assert isinstance(request, FetchRequest), "one of the expected kinds"
                index = self._answer(channel, peer, request, index, compressor)
        except FabricError as error:
            _LOG.info("refused a transfer: %s", error.message)
            self._count(f"refused_{error.code}")
            channel.refuse(error)
        except TamperedError as error:
            _LOG.warning("dropped a transfer connection: %s", error)
            self._count("refused_tampered")
        except OSError:
            self._count("broken")
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(channel, None)
                self._authenticated.discard(channel)

    def _handshake(self, channel: Channel) -> NodeName:
        hello = channel.receive(Hello)
        assert isinstance(hello, Hello), "the only kind expected"
        if hello.source != self._name:
            message = "another node listens here"
            raise RejectedError(message, code="wrong_node")
        nonce = secrets.token_bytes(NONCE_BYTES)
        key = self._cluster_key
        encrypts = hello.encrypts or must_encrypt(self._encrypt_links, channel)
        proof = prove(key, HandshakeRole.SERVER, hello, nonce, encrypts=encrypts)
        channel.send(Challenge(nonce, proof, encrypts))
        answer = channel.receive(Proof)
        assert isinstance(answer, Proof), "the only kind expected"
        check_proof(key, HandshakeRole.CLIENT, hello, nonce, answer.proof, encrypts=encrypts)
        keys = session_keys(key, hello, nonce, encrypts=encrypts)
        channel.seal(keys.server, keys.client, encrypts=encrypts)
        if hello.fingerprint != self._fingerprint:
            message = "the nodes run different models or settings that change the cache"
            raise ConflictError(message, code="fingerprint_mismatch")
        return hello.name

    def _answer(
        self,
        channel: Channel,
        peer: NodeName,
        request: FetchRequest,
        index: int,
        compressor: Compressor,
    ) -> int:
        offered = self.offers.check(request.ticket, peer)
        begin_turn(offered.turn)  # sets the turn of this thread until its next request
        refs = [_find(offered.refs, part) for part in request.parts]
        link = request.link_bytes_per_s
        with (
            self._mark_answering(channel),
            self._gate.sending(channel.local_host(), request.urgency) as sender,
        ):
            yield_to_urgent = partial(self._yield_to_urgent, sender)
            for ref, part in zip(refs, request.parts, strict=True):
                with self._open_payload(ref) as payload:
                    slices = send_range(
                        channel, payload, index, part, link, compressor, yield_to_urgent
                    )
                    for sent in slices:
                        with self._lock:
                            self._counts["bytes"] += sent
                index += 1
                self._count("parts")
        return index

    @contextmanager
    def _mark_answering(self, channel: Channel) -> Iterator[None]:
        with self._lock:
            self._answering.add(channel)
        try:
            yield
        finally:
            with self._lock:
                self._answering.discard(channel)

    @contextmanager
    def _open_payload(self, ref: BlockRef) -> Iterator[Payload]:
        try:
            payload = self._blocks.open_payload(ref)
        except FileNotFoundError:
            message = "the block is no longer here"
            raise NotFoundError(message) from None
        except OSError as error:
            message = f"the block cannot be read ({error.strerror})"
            raise RetryLaterError(message) from None
        try:
            if payload.length != ref.payload_bytes:
                message = "the block's file does not have the length in its record"
                raise CorruptDataError(message)
            yield payload
        finally:
            payload.close()

    def _yield_to_urgent(self, sender: Sender) -> None:
        if self._gate.before_slice(sender):
            self._count("slices_held_back")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _refuse_call(_raw: bytes, _peer: NodeName) -> bytes:
    message = "the node is starting"
    raise RetryLaterError(message)


def _watch(
    selector: selectors.BaseSelector, old: set[socket.socket], new: set[socket.socket]
) -> set[socket.socket]:
    """Watch `new` listeners instead of `old` ones."""
    for sock in old - new:
        selector.unregister(sock)
    for sock in new - old:
        selector.register(sock, selectors.EVENT_READ)
    return new


def _find(refs: Mapping[str, BlockRef], part: FetchPart) -> BlockRef:
    name = f"{part.block_hash.hex()}-{part.checksum.hex()}"
    ref = refs.get(name)
    if ref is None:
        message = "the ticket does not cover that block"
        raise UnauthorizedError(message, code="not_offered")
    if part.offset + part.length > ref.payload_bytes:
        message = "the range lies past the block's end"
        raise RejectedError(message, code="bad_range")
    return ref
