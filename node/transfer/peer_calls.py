"""Control calls from node to node, over the authenticated connections of the data plane."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from fabric.errors import FabricError, RetryLaterError
from fabric.ids import NodeName
from fabric.net.links import Address
from fabric.net.wire import PeerCall, PeerReply, Refusal, refusal_error
from node.limits import HEAD_CONNECT_S, HEAD_REPLY_S
from node.net.connections import Connection, Connections
from node.net.link_table import LinkTable
from node.net.peer import FetchTimeouts, Peer
from node.net.probe import cut_after
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers

_ADDRESSES_TRIED: Final = 2
# Takes a node, its addresses, a call and the seconds that the node may wait; returns its reply.
AskNode: TypeAlias = Callable[[NodeName, Sequence[Address], bytes, float], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class PeerCalls:
    """Calls to other nodes."""

    identity: NodeIdentity
    workers: Workers
    links: LinkTable
    connections: Connections

    async def call(
        self, source: NodeName, addresses: Sequence[Address], raw: bytes, wait_s: float
    ) -> bytes:
        """Return a node's reply; raise FabricError or OSError if none comes in time.

        `wait_s`: how long the node may wait before it answers.
        """
        return await self.workers.fetch_head(lambda: self._call(source, addresses, raw, wait_s))

    def _call(
        self, source: NodeName, addresses: Sequence[Address], raw: bytes, wait_s: float
    ) -> bytes:
        config = self.identity.config
        timeouts = replace(FetchTimeouts(), connect_s=HEAD_CONNECT_S, handshake_s=HEAD_REPLY_S)
        peer = Peer(
            config.name,
            source,
            config.cluster_key,
            self.identity.fingerprint,
            timeouts,
            self.identity.settings.encrypt_links,
        )
        error: OSError | None = None
        for address, _ in self.links.rank(source, addresses)[:_ADDRESSES_TRIED]:
            idle = self.connections.take(peer, address)
            if idle is not None:
                try:
                    return self._exchange(peer, address, idle, raw, wait_s)
                except TimeoutError:
                    raise
                except OSError:  # the peer closed it meanwhile
                    pass
            try:
                return self._exchange(peer, address, _connect(peer, address), raw, wait_s)
            except OSError as failure:
                error = failure
        message = f"{source} does not answer ({type(error).__name__})"
        raise RetryLaterError(message) from error

    def _exchange(
        self, peer: Peer, address: Address, connection: Connection, raw: bytes, wait_s: float
    ) -> bytes:
        channel = connection.channel
        try:
            with cut_after(channel, wait_s + HEAD_REPLY_S):
                channel.send(PeerCall(raw))
                reply = channel.receive(PeerReply, Refusal)
        except (OSError, FabricError):
            channel.close()
            raise
        if isinstance(reply, Refusal):
            channel.close()
            raise refusal_error(reply)
        assert isinstance(reply, PeerReply), "one of the two expected kinds"
        self.connections.keep(peer, address, connection)
        return reply.body


def _connect(peer: Peer, address: Address) -> Connection:
    channel = peer.dial(address)
    try:
        with cut_after(channel, peer.timeouts.handshake_s):
            peer.authenticate(channel)
    except (OSError, FabricError):
        channel.close()
        raise
    return Connection(channel)
