"""Measurement of one link, client and server: reachability, round-trip time and rate.

The handshake is that of a transfer, so an answer proves that the peer itself is reachable.
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Timer
from typing import Final

from fabric.errors import FabricError, OverloadedError
from fabric.ids import Fingerprint, NodeName
from fabric.limits import HANDSHAKE_TIMEOUT_S, KIB
from fabric.net.interfaces import Interface
from fabric.net.link_estimate import PROBE_BYTES_MIN
from fabric.net.links import Address
from fabric.net.wire import (
    PROBE_CHUNK_BYTES,
    Goodbye,
    Ping,
    Pong,
    Probe,
    ProbeChunk,
    Refusal,
    refusal_error,
)
from fabric.settings import AUTO
from node.net.addresses import dial
from node.net.channel import Channel
from node.net.peer import FetchTimeouts, Peer

PINGS: Final = 4
CONNECT_S: Final = 2.0
PROBE_ENOUGH_S: Final = 0.25  # then the received bytes suffice
PROBE_S: Final = 3.0  # then what was received is the measurement
SLOW_CHUNK_BYTES: Final = 16 * KIB  # size of the first chunks, so that a slow link delivers some

_PROBLEMS: Final = {
    errno.EHOSTUNREACH: "host_unreachable",  # 65 on macOS, also by Local Network Privacy
    errno.ENETUNREACH: "network_unreachable",
    errno.ECONNREFUSED: "refused",
    errno.EADDRNOTAVAIL: "interface_gone",
    errno.ENODEV: "interface_gone",
    errno.ENXIO: "interface_gone",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one measurement: either a round trip, or a problem's code."""

    rtt_s: float | None = None
    interface: Interface | None = None
    problem: str | None = None
    moved_bytes: int = 0
    seconds: float = 0.0
    is_probe_unfinished: bool = False  # refused by a busy peer, or nothing was received


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of the measuring node."""

    name: NodeName
    cluster_key: bytes
    fingerprint: Fingerprint
    encrypt_links: str = AUTO

    def measure(self, peer: NodeName, address: Address, probe_bytes: int = 0) -> Measured:
        """Ping `peer` at `address`, then fetch `probe_bytes`; return failures as results."""
        try:
            dialled = dial(address.host, address.port, CONNECT_S, address.kind)
        except FabricError as error:
            return Measured(problem=error.code)
        except OSError as error:
            return Measured(problem=problem_of(error))
        try:
            channel = Channel(dialled.sock, time.monotonic, HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            dialled.sock.close()
            return Measured(interface=dialled.interface, problem=problem_of(error))
        rtt_s: float | None = None
        problem, moved_bytes, seconds, is_unfinished = None, 0, 0.0, False
        try:
            with cut_after(channel, HANDSHAKE_TIMEOUT_S):
                self._peer(peer).authenticate(channel)
                rtt_s = _round_trip_s(channel)
            if probe_bytes:
                moved_bytes, seconds = _probe(channel, probe_bytes)
            else:
                channel.send(Goodbye())
        except FabricError as error:
            problem, is_unfinished = error.code, rtt_s is not None
        except OSError as error:
            problem, is_unfinished = problem_of(error), rtt_s is not None
        finally:
            channel.close()
        if rtt_s is None:
            return Measured(interface=dialled.interface, problem=problem)
        # A peer that answers pings works, even if it refuses a probe.
        took_s = max(1e-9, seconds - rtt_s)
        return Measured(rtt_s, dialled.interface, None, moved_bytes, took_s, is_unfinished)

    def _peer(self, name: NodeName) -> Peer:
        own = (self.cluster_key, self.fingerprint, FetchTimeouts(), self.encrypt_links)
        return Peer(self.name, name, *own)


def problem_of(error: OSError) -> str:
    """Return the code of a connection's system error."""
    if isinstance(error, TimeoutError):
        return "silent"
    return _PROBLEMS.get(error.errno or 0, "broken")


def _round_trip_s(channel: Channel) -> float:
    """Return the shortest of a few round trips, as the others include delays."""
    best_s = float("inf")
    for number in range(PINGS):
        began_s = time.monotonic()
        channel.send(Ping(number))
        reply = channel.receive(Pong, Refusal)
        if isinstance(reply, Refusal):
            raise refusal_error(reply)
        best_s = min(best_s, time.monotonic() - began_s)
    return best_s


def _probe(channel: Channel, size_bytes: int) -> tuple[int, float]:
    """Return the received bytes and their seconds; a slow probe ends early.

    Raises TimeoutError if nothing was received in time.
    """
    began_s = time.monotonic()
    moved_bytes, seconds = 0, 0.0
    try:
        with cut_after(channel, PROBE_S):
            channel.send(Probe(size_bytes))
            while moved_bytes < size_bytes:
                if seconds >= PROBE_ENOUGH_S and moved_bytes >= PROBE_BYTES_MIN:
                    channel.cut()
                    return moved_bytes, seconds
                moved_bytes += len(_receive_chunk(channel).data)
                seconds = time.monotonic() - began_s
            channel.send(Goodbye())
    except TimeoutError:
        if not moved_bytes:
            raise
    return moved_bytes, seconds


def _receive_chunk(channel: Channel) -> ProbeChunk:
    reply = channel.receive(ProbeChunk, Refusal)
    if isinstance(reply, Refusal):
        raise refusal_error(reply)
    assert isinstance(reply, ProbeChunk), "one of the two expected kinds"
    return reply


@contextmanager
def cut_after(channel: Channel, seconds: float) -> Iterator[None]:
    """Cut the connection and raise TimeoutError if a block takes longer."""
    late = Event()

    def cut() -> None:
        late.set()
        channel.cut()

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except OSError:
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


_FILL: Final = bytes(range(256)) * (PROBE_CHUNK_BYTES // 256)


class LinkAnswers:
    """Answers of a server to link probes; shared by its connections."""

    def __init__(self, is_sending: Callable[[], bool]) -> None:
        """`is_sending`: payload is being sent to a peer, so probes are refused."""
        self._is_sending = is_sending
        self._probing = Lock()

    def answer(self, channel: Channel, request: Ping | Probe) -> None:
        """Answer one request; raise OverloadedError where a probe would delay a transfer."""
        if isinstance(request, Ping):
            channel.send(Pong(request.number))
            return
        message = "the link is in use"
        if not self._probing.acquire(blocking=False):
            raise OverloadedError(message)
        try:
            sent = 0
            while sent < request.size_bytes:
                if self._is_sending():
                    raise OverloadedError(message)
                chunk_bytes = SLOW_CHUNK_BYTES if sent < PROBE_BYTES_MIN else PROBE_CHUNK_BYTES
                chunk = ProbeChunk(_FILL[: min(chunk_bytes, request.size_bytes - sent)])
                channel.send(chunk)
                sent += len(chunk.data)
        finally:
            self._probing.release()
