"""Hostile bytes from either end cost neither memory nor time, and are never taken for a block."""

import socket
import struct
import time
import tracemalloc
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest

from fabric import PROTOCOL_VERSION
from fabric.errors import CorruptDataError, RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.ids import MigrationId
from fabric.net import compression
from fabric.net.handshake import HandshakeRole, prove, session_keys
from fabric.net.wire import (
    Challenge,
    FetchPart,
    FetchRequest,
    Hello,
    PayloadCodec,
    PayloadHead,
    Proof,
    Refusal,
    encode_frame,
)
from node.limits import TRANSFER_REQUEST_BYTES
from node.net.connections import Connections
from node.net.peer import Peer
from tests.support.transfers import (
    BRIEF,
    FINGERPRINT,
    HASTE,
    KEY,
    SOURCE,
    TARGET,
    Catch,
    answer_of,
    await_count,
    dialled,
    fetch,
    impostor,
    loopback,
    offer,
    part,
    serve,
)

MIB = 1 << 20


@pytest.fixture
def server(shelf):
    return serve(shelf, SystemClock(), connections_max=4)


def assert_still_serves(shelf, server, port):
    ref = shelf.add(3_000, seed=port)
    _, catch = fetch([loopback(port)], offer(server, [ref], MigrationId("still-serves")), [ref])

    assert list(catch.blocks) == [ref.name]


@contextmanager
def trace_memory():
    """Yield a list that receives the block's peak memory."""
    peaks = []
    tracemalloc.start()
    try:
        yield peaks
    finally:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


# --- hostile clients -------------------------------------------------------------------------


HOSTILE_BYTES = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge frame": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 1, 0xFFFFFFFF),
    "unknown kind": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 99, 4) + b"abcd",
    "early request": encode_frame(
        FetchRequest(b"t", (FetchPart(b"h" * 32, b"c" * 16, 0, 1),))  # type: ignore[arg-type]
    ),
    "nested arrays": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 1, 512) + b"\xdd" * 512,
    "empty": b"",
    "endless": b"\x00" * (8 * MIB),
}


@pytest.mark.parametrize("name", HOSTILE_BYTES)
def test_stranger_gets_a_refusal_and_bounded_memory(shelf, server, port, name):
    with trace_memory() as peaks, dialled(port) as (_, sock):
        with suppress(ConnectionError):
            sock.sendall(HOSTILE_BYTES[name])
            sock.shutdown(socket.SHUT_WR)
        answer = answer_of(sock)

    assert len(answer) < 500
    assert peaks[0] < 2 * MIB
    assert_still_serves(shelf, server, port)


def test_silent_and_dripping_clients_end_at_the_handshake_timeout(shelf):
    server = serve(shelf, SystemClock(), handshake_s=0.5)
    port = server.addresses()[0].port
    began_s = time.monotonic()
    with dialled(port) as (_, silent), dialled(port) as (_, dripping):
        raw = encode_frame(Hello(TARGET, SOURCE, FINGERPRINT, b"n" * 32))
        with suppress(ConnectionError):
            for byte in raw:
                dripping.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began_s > 20:
                    pytest.fail("the server listens to drips for ever")
        assert answer_of(silent) == b""
    assert 0.4 < time.monotonic() - began_s < 20


def test_silent_strangers_do_not_block_a_peer(shelf, server, port):
    with ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert_still_serves(shelf, server, port)
        await_count(server, "refused_overloaded", 16)


def test_peer_that_does_not_read_is_dropped(shelf):
    server = serve(shelf, SystemClock(), timeout_s=0.3)
    ref = shelf.add(24 * MIB)
    ticket = offer(server, [ref])
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE)
    with closing(peer.dial(server.addresses()[0])) as channel:
        peer.authenticate(channel)
        channel.send(FetchRequest(ticket, (part(ref),)))
        await_count(server, "broken")

    assert server.counts()["broken"] == 1


def test_authenticated_peer_dripping_its_request_is_dropped(shelf):
    server = serve(shelf, SystemClock(), timeout_s=0.5)
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE)
    raw = encode_frame(FetchRequest(b"t", (FetchPart(b"h" * 32, b"c" * 16, 0, 1),)))

    with closing(peer.dial(server.addresses()[0])) as channel:
        peer.authenticate(channel)
        with suppress(ConnectionError):
            for byte in raw[:-1]:
                channel._sock.sendall(bytes([byte]))
                time.sleep(0.05)
                if server.counts().get("broken"):
                    break
        await_count(server, "broken")

    assert server.counts()["broken"] == 1


@pytest.mark.parametrize(("offset", "length"), [(999, 2), (1_000, 1), (0, 1_001)])
def test_range_past_the_end_is_refused(shelf, server, port, offset, length):
    ref = shelf.add(1_000)
    ticket = offer(server, [ref])
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE)
    with closing(peer.dial(loopback(port))) as channel:
        peer.authenticate(channel)
        channel.send(FetchRequest(ticket, (part(ref, offset, length),)))

        assert channel.receive(Refusal).code == "bad_range"
    assert server.counts()["refused_bad_range"] == 1


# --- hostile servers that hold the key -------------------------------------------------------


def authenticated_server(then):
    def act(channel, sock):
        authenticating = channel.receive(Hello)
        nonce = b"s" * 32
        proof = prove(KEY, HandshakeRole.SERVER, authenticating, nonce, encrypts=True)
        channel.send(Challenge(nonce, proof, encrypts=True))
        channel.receive(Proof)
        keys = session_keys(KEY, authenticating, nonce, encrypts=True)
        channel.seal(keys.server, keys.client, encrypts=True)
        channel.receive(FetchRequest)
        then(channel, sock)

    return act


def frame_of(kind, body):
    return struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, kind, len(body)) + body


def send_authenticated(raw):
    """Send `raw` under a valid MAC."""
    return lambda channel, sock: sock.sendall(channel._seal_frame(raw))


def sent_message(message):
    return lambda channel, _: channel.send(message)


def sliced(head, payload):
    def act(channel, _):
        channel.room(len(payload))[:] = payload
        channel.send_slice(head)

    return act


def send_unauthenticated(raw):
    """Send `raw` without any MAC, as a man in the middle would have to."""
    return lambda _, sock: sock.sendall(raw)


SIZE = 100_000
BOMB = compression.compress_slice(bytes(64 * MIB))
ZSTD = PayloadCodec.ZSTD
LIES = {
    "longer than the block": sent_message(PayloadHead(0, 0, SIZE + 1, SIZE + 1)),
    "longest possible": sent_message(PayloadHead(0, 0, MIB, MIB)),
    "another block": sent_message(PayloadHead(1, 0, SIZE, SIZE)),
    "another offset": sent_message(PayloadHead(0, 1, SIZE - 1, SIZE - 1)),
    "no message": send_authenticated(frame_of(5, b"\xc1")),
    "missing fields": send_authenticated(frame_of(5, b"\x80")),
    "zstd bomb": sliced(PayloadHead(0, 0, SIZE, len(BOMB), ZSTD), BOMB),
    "zstd junk": sliced(PayloadHead(0, 0, SIZE, 50, ZSTD), b"j" * 50),
    "wrong bytes": sliced(PayloadHead(0, 0, SIZE, SIZE), b"w" * SIZE),
    "a novel": send_authenticated(frame_of(6, b"\x82\xa4code\xa9bad\nthing\xa7message\xa2hi")),
}
FORGERIES = {
    "oversize frame": send_unauthenticated(
        struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 5, 1 << 31)
    ),
    "a request": sent_message(FetchRequest(b"t", (FetchPart(b"h" * 32, b"c" * 16, 0, 1),))),
    "no mac": send_unauthenticated(
        encode_frame(PayloadHead(0, 0, SIZE, SIZE)) + b"w" * SIZE + bytes(32)
    ),
    "a refusal without a mac": send_unauthenticated(
        encode_frame(Refusal("bad_ticket", "no")) + bytes(16)
    ),
    "endless zeros": send_unauthenticated(b"\x00" * (4 * MIB)),
}


@pytest.mark.parametrize("lie", [*LIES, *FORGERIES])
def test_lying_server_is_detected_in_bounded_memory(shelf, server, lie):
    ref = shelf.add(SIZE)
    ticket = offer(server, [ref])
    catch, connections = Catch(), Connections()
    is_proven = lie in LIES
    act = LIES[lie] if is_proven else FORGERIES[lie]

    expected = pytest.raises(CorruptDataError if is_proven else RetryLaterError)
    with (
        trace_memory() as peaks,
        closing(connections),
        impostor(authenticated_server(act)) as address,
        expected,
    ):
        timeouts = replace(HASTE, silence_alone_s=1.0)  # for servers that fall silent after the lie
        fetch([address], ticket, [ref], catch, connections=connections, timeouts=timeouts)

    assert catch.blocks == {}
    assert len(catch.allocated) <= 1
    assert peaks[0] < 3 * MIB  # of which one slice is the impostor's
    assert connections.counts()["corrupt" if is_proven else "tampered"] >= 2


def test_lying_server_does_not_affect_an_honest_link(shelf, server, port):
    ref = shelf.add(SIZE)
    with impostor(authenticated_server(FORGERIES["no mac"])) as address:
        _, catch = fetch([address, loopback(port)], offer(server, [ref]), [ref])

    assert list(catch.blocks) == [ref.name]


def test_dripping_server_is_given_up(shelf, server):
    ref = shelf.add(SIZE)

    def drip(channel, sock):
        channel.send(PayloadHead(0, 0, SIZE, SIZE))
        with suppress(OSError):
            while True:
                sock.sendall(b"d")
                time.sleep(0.02)

    with impostor(authenticated_server(drip)) as address, pytest.raises(RetryLaterError):
        fetch([address], offer(server, [ref]), [ref], timeouts=BRIEF)


def test_next_range_is_requested_before_the_last_one_arrives(shelf, server):
    # Each is a separate range.
    refs = [shelf.add(TRANSFER_REQUEST_BYTES + MIB, seed) for seed in range(3)]
    requests = []

    def listen(channel, sock):
        raw = shelf.payload(refs[0])
        for offset in range(0, len(raw) - 1, MIB):  # all of the first range but a byte
            part = raw[offset : min(offset + MIB, len(raw) - 1)]
            channel.room(len(part))[:] = part
            channel.send_slice(PayloadHead(0, offset, len(part), len(part)))
        requests.append(channel.receive(FetchRequest))
        sock.shutdown(socket.SHUT_RDWR)

    hurried = replace(HASTE, rounds=1)
    with impostor(authenticated_server(listen)) as address, suppress(RetryLaterError):
        fetch([address], offer(server, refs), refs, streams=1, timeouts=hurried)

    assert requests
