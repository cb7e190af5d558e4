"""Authenticated connections to peers, kept for a while: a handshake costs as much as a megabyte.

Also counts events of the connections of this node's fetches.
"""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from fabric.ids import Fingerprint, NodeName
from fabric.net.links import Address
from fabric.net.wire import Goodbye
from node.limits import TRANSFER_IDLE_MAX, TRANSFER_IDLE_S
from node.net.channel import Channel
from node.net.peer import Peer


@dataclass(slots=True, eq=False)
class Connection:
    """An authenticated channel, and the number of parts received on it, which both ends count."""

    channel: Channel
    received: int = 0
    idle_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _ConnectionKey:
    name: NodeName
    source: NodeName
    cluster_key: bytes = field(repr=False)
    fingerprint: Fingerprint
    address: Address


def _connection_key(peer: Peer, address: Address) -> _ConnectionKey:
    return _ConnectionKey(peer.name, peer.source, peer.cluster_key, peer.fingerprint, address)


class Connections:
    """Idle connections by peer and address, at most TRANSFER_IDLE_MAX, oldest dropped first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[tuple[_ConnectionKey, Connection]] = []
        self._counts: Counter[str] = Counter()
        self._closed = False

    def take(self, peer: Peer, address: Address) -> Connection | None:
        key = _connection_key(peer, address)
        while True:
            with self._lock:
                stale = self._stale()
                idle = next((item for item in reversed(self._idle) if item[0] == key), None)
                if idle is not None:
                    self._idle.remove(idle)
            _close_all(stale)
            if idle is None:
                return None
            if idle[1].channel.is_quiet():
                self.count("reused")
                return idle[1]
            idle[1].channel.close()

    def keep(self, peer: Peer, address: Address, connection: Connection) -> None:
        """Return a connection to the pool, after everything requested on it has arrived."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append((_connection_key(peer, address), connection))
            stale = self._stale()
        _close_all(stale)

    def close(self) -> None:
        """Close every idle connection, and from now on each one that is returned."""
        with self._lock:
            self._closed = True
            stale = self._stale()
        _close_all(stale)

    def count(self, what: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self._counts[what] += times

    def counts(self) -> dict[str, int]:
        """Count dials, reuses, takeovers, failures by kind, blocks and bytes since the start."""
        with self._lock:
            return dict(self._counts)

    def _stale(self) -> list[Connection]:
        oldest_s = time.monotonic() - TRANSFER_IDLE_S
        idle_max = 0 if self._closed else TRANSFER_IDLE_MAX
        fresh = [item for item in self._idle if item[1].idle_since_s >= oldest_s]
        kept = fresh[max(0, len(fresh) - idle_max) :]
        stale = [item[1] for item in self._idle if item not in kept]
        self._idle = kept
        return stale


def _close_all(connections: list[Connection]) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.channel.send(Goodbye())
        connection.channel.close()
