"""The node at the other end, as the fetching side sees it: dialled, and made to prove itself."""

import secrets
import time
from dataclasses import dataclass, field

from fabric.control import Address
from fabric.ids import Fingerprint, NodeName
from fabric.limits import (
    HANDSHAKE_TIMEOUT_S,
    TRANSFER_SILENCE_ALONE_S,
    TRANSFER_SILENCE_S,
    TRANSFER_TIMEOUT_S,
)
from fabric.wire import (
    NONCE_BYTES,
    Challenge,
    Hello,
    Proof,
    Refusal,
    Role,
    check_proof,
    prove,
    refusal_error,
    session_keys,
)
from node.addresses import connect
from node.channel import Channel


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a peer, and how often."""

    connect_s: float = 2.0
    handshake_s: float = HANDSHAKE_TIMEOUT_S
    slice_s: float = TRANSFER_TIMEOUT_S
    silence_s: float = TRANSFER_SILENCE_S  # while another link moves
    silence_alone_s: float = TRANSFER_SILENCE_ALONE_S
    pause_s: float = 0.1  # before an address that failed is tried again; doubles up to the max
    pause_max_s: float = 2.0
    rounds: int = 4  # tries of every address in a row without progress


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom to fetch from, and as whom."""

    name: NodeName
    source: NodeName
    cluster_key: bytes = field(repr=False)
    fingerprint: Fingerprint
    patience: Patience

    def dial(self, address: Address) -> Channel:
        """Connect; nothing may be asked before `greet`."""
        sock = connect(address.host, address.port, self.patience.connect_s, address.kind)
        try:
            return Channel(sock, time.monotonic, self.patience.slice_s)
        except OSError:
            sock.close()
            raise

    def greet(self, channel: Channel) -> None:
        """Make both ends prove that they hold the cluster's key."""
        channel.hurry(self.patience.handshake_s)
        key = self.cluster_key
        hello = Hello(self.name, self.source, self.fingerprint, secrets.token_bytes(NONCE_BYTES))
        channel.send(hello)
        reply = channel.receive(Challenge, Refusal)
        if isinstance(reply, Refusal):
            raise refusal_error(reply)
        assert isinstance(reply, Challenge), "one of the two expected kinds"
        check_proof(key, Role.SERVER, hello, reply.nonce, reply.proof)
        channel.send(Proof(prove(key, Role.CLIENT, hello, reply.nonce)))
        keys = session_keys(key, hello, reply.nonce)
        channel.seal(keys.client, keys.server)
        channel.relax()
