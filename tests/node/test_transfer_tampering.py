"""A man in the middle of a transfer can only end connections."""

import time
from functools import partial

import pytest

from fabric.errors import RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.net.wire import FetchRequest, encode_frame
from fabric.settings import NEVER
from node.net.connections import Connections
from tests.faults.meddling_proxy import MeddlingProxy
from tests.support.transfers import HASTE, Catch, loopback, offer, serve
from tests.support.transfers import fetch as fetch_somehow

# Connections here are not encrypted, so the man in the middle can locate each slice.
# test_transfer_privacy.py covers encrypted ones.
MIB = 1 << 20
SIZE = 100_000


fetch = partial(fetch_somehow, encrypt_links=NEVER)


@pytest.fixture
def server(shelf):
    server = serve(shelf, SystemClock(), encrypt_links=NEVER)
    yield server
    server.stop()


def flipped(raw, at):
    raw = bytearray(raw)
    raw[at] ^= 1
    return bytes(raw)


class Meddler:
    """A man in the middle that changes the third and fourth slices, or one request."""

    def __init__(self, change):
        self._change = change
        self._seen = []

    def __call__(self, unit):
        if not unit.payload and not isinstance(unit.message, FetchRequest):
            return unit.raw
        self._seen.append(unit)
        return self._change(self._seen)


def change_third(change):
    """Apply `change` to the units seen so far once there are three."""
    return lambda seen: change(seen) if len(seen) == 3 else seen[-1].raw


def swap(seen):
    if len(seen) == 3:
        return b""
    return seen[3].raw + seen[2].raw if len(seen) == 4 else seen[-1].raw


PAYLOAD_TRICKS = {
    "flip the head": change_third(lambda seen: flipped(seen[2].frame, 20) + seen[2].payload),
    "flip the head's mac": change_third(lambda seen: flipped(seen[2].frame, -1) + seen[2].payload),
    "flip the payload": change_third(lambda seen: seen[2].frame + flipped(seen[2].payload, 77)),
    "flip the payload's mac": change_third(
        lambda seen: seen[2].frame + flipped(seen[2].payload, -1)
    ),
    "swap slices": swap,
    "swap payloads": change_third(lambda seen: seen[2].frame + seen[1].payload),
    "repeat a slice": change_third(lambda seen: seen[1].raw + seen[2].raw),
    "drop a slice": change_third(lambda _: b""),
    "truncate": change_third(lambda seen: seen[2].raw[:-9_999]),
    "hang up in a slice": change_third(lambda _: None),
}


@pytest.mark.parametrize("trick", PAYLOAD_TRICKS)
def test_tampered_payload_is_never_accepted(shelf, server, port, trick):
    refs = [shelf.add(6 * MIB), shelf.add(6 * MIB, 1)]
    ticket = offer(server, refs)
    connections = Connections()
    meddlers = [Meddler(PAYLOAD_TRICKS[trick]) for _ in range(2)]

    with MeddlingProxy(("127.0.0.1", port), meddlers) as proxy:
        address = loopback(proxy.port)
        _, catch = fetch([address], ticket, refs, streams=1, connections=connections)
        connections.close()

        assert proxy.connections == 3
    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    counts = connections.counts()
    assert counts["broken" if trick == "hang up in a slice" else "tampered"] == 2


def test_persistent_tampering_ends_the_fetch(shelf, server, port):
    refs = [shelf.add(SIZE)]
    catch = Catch()
    meddlers = [lambda unit: unit.frame + flipped(unit.payload, 5) if unit.payload else unit.raw]

    with MeddlingProxy(("127.0.0.1", port), meddlers * 50) as proxy:
        with pytest.raises(RetryLaterError, match="did not send"):
            fetch([loopback(proxy.port)], offer(server, refs), refs, catch)

        assert proxy.connections == HASTE.rounds
    assert catch.blocks == {}


def test_slice_replayed_from_another_connection_is_refused(shelf, server, port):
    ref = shelf.add(SIZE)
    ticket = offer(server, [ref])
    recorded = []

    def record(unit):
        recorded.append(unit.raw)
        return unit.raw

    def replay(unit):
        return recorded[1] if unit.payload else unit.raw

    connections = Connections()
    with MeddlingProxy(("127.0.0.1", port), [record, replay]) as proxy:
        for _ in range(2):
            kept = Connections()
            _, catch = fetch([loopback(proxy.port)], ticket, [ref], connections=kept)
            kept.close()
            connections = kept

    assert len(recorded) == 2  # the challenge and one slice
    assert connections.counts()["tampered"] == 1
    assert list(catch.blocks) == [ref.name]


REQUEST_TRICKS = {
    "flip the ticket": lambda seen: flipped(seen[-1].raw, 60),
    "flip the mac": lambda seen: flipped(seen[-1].raw, -1),
    "ask twice": lambda seen: seen[-1].raw * 2,
    "ask without a mac": lambda seen: encode_frame(seen[-1].message) + bytes(16),
}


@pytest.mark.parametrize("trick", REQUEST_TRICKS)
def test_tampered_request_is_refused_and_counted(shelf, server, port, trick):
    ref = shelf.add(SIZE)
    meddlers = [Meddler(REQUEST_TRICKS[trick])]

    with MeddlingProxy(("127.0.0.1", port), meddlers, side="client") as proxy:
        _, catch = fetch([loopback(proxy.port)], offer(server, [ref]), [ref])
        deadline_s = time.monotonic() + 60
        while not server.counts().get("refused_tampered") and time.monotonic() < deadline_s:
            time.sleep(0.01)

    assert server.counts()["refused_tampered"] == 1
    assert catch.blocks == {ref.name: shelf.payload(ref)}
