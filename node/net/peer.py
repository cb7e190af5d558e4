"""The peer of a fetch: dialing, mutual authentication, and which links must be encrypted."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Protocol

from fabric.errors import RejectedError
from fabric.ids import Fingerprint, NodeName
from fabric.limits import HANDSHAKE_TIMEOUT_S
from fabric.net.handshake import HandshakeRole, check_proof, prove, session_keys
from fabric.net.links import Address
from fabric.net.wire import NONCE_BYTES, Challenge, Hello, Proof, Refusal, refusal_error
from fabric.settings import ALWAYS, AUTO, NEVER
from node.limits import TRANSFER_SILENCE_ALONE_S, TRANSFER_SILENCE_S, TRANSFER_TIMEOUT_S
from node.net.addresses import connect
from node.net.channel import Channel


class LinkEnd(Protocol):
    """Connection that can tell whether it runs over a Thunderbolt cable."""

    def is_on_cable(self) -> bool:
        """Return whether everything it sends leaves through a Thunderbolt cable."""
        ...


def must_encrypt(mode: str, end: LinkEnd) -> bool:
    """Return whether this end requires encryption; `mode` is `node.encrypt_links`.

    Each end checks its own interface; a connection is encrypted if either requires it.
    """
    return mode == ALWAYS or (mode != NEVER and not end.is_on_cable())


@dataclass(frozen=True, slots=True)
class FetchTimeouts:
    """Timeouts and retries of a fetch from one peer."""

    connect_s: float = 2.0
    handshake_s: float = HANDSHAKE_TIMEOUT_S
    slice_s: float = TRANSFER_TIMEOUT_S
    silence_s: float = TRANSFER_SILENCE_S  # limit while another link makes progress
    silence_alone_s: float = TRANSFER_SILENCE_ALONE_S
    pause_s: float = 0.1  # before a failed address is retried; doubles up to the maximum
    pause_max_s: float = 2.0
    rounds: int = 4  # tries of every address without progress, after which the fetch fails


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer to fetch from, and the identity that this node presents to it."""

    name: NodeName
    source: NodeName
    cluster_key: bytes = field(repr=False)
    fingerprint: Fingerprint
    timeouts: FetchTimeouts
    encrypt_links: str = AUTO

    def dial(self, address: Address) -> Channel:
        """Connect; nothing may be requested before `authenticate`."""
        sock = connect(address.host, address.port, self.timeouts.connect_s, address.kind)
        try:
            return Channel(sock, time.monotonic, self.timeouts.slice_s)
        except OSError:
            sock.close()
            raise

    def authenticate(self, channel: Channel) -> None:
        """Prove to each other that both ends have the cluster key, and agree on encryption."""
        channel.set_deadline(self.timeouts.handshake_s)
        key = self.cluster_key
        wants = must_encrypt(self.encrypt_links, channel)
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = Hello(self.name, self.source, self.fingerprint, nonce, wants)
        channel.send(hello)
        reply = channel.receive(Challenge, Refusal)
        if isinstance(reply, Refusal):
            raise refusal_error(reply)
        assert isinstance(reply, Challenge), "one of the two expected kinds"
        encrypts = reply.encrypts
        check_proof(key, HandshakeRole.SERVER, hello, reply.nonce, reply.proof, encrypts=encrypts)
        if wants and not encrypts:
            message = "the peer does not encrypt; set node.encrypt_links alike on all nodes"
            raise RejectedError(message, code="bad_frame")
        proof = prove(key, HandshakeRole.CLIENT, hello, reply.nonce, encrypts=encrypts)
        channel.send(Proof(proof))
        keys = session_keys(key, hello, reply.nonce, encrypts=encrypts)
        channel.seal(keys.client, keys.server, encrypts=encrypts)
        channel.clear_deadline()
