"""Hostile bytes from either end cost neither memory nor time, and are never taken for a block."""

import socket
import struct
import time
import tracemalloc
from contextlib import suppress

import pytest

from fabric import PROTOCOL_VERSION, compression
from fabric.errors import CorruptDataError, RetryLaterError
from fabric.ids import MigrationId
from fabric.limits import BLOCK_BYTES_MAX
from fabric.wire import (
    Challenge,
    FetchPart,
    FetchRequest,
    Hello,
    PayloadCodec,
    PayloadHead,
    Proof,
    Refusal,
    Role,
    encode_frame,
    prove,
)
from node.clock import SystemClock
from node.peer import Peer
from tests.support.transfers import (
    FINGERPRINT,
    HASTE,
    KEY,
    SOURCE,
    TARGET,
    Catch,
    Shelf,
    answer_of,
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
def shelf(tmp_path):
    return Shelf(tmp_path)


@pytest.fixture
def server(shelf):
    server = serve(shelf, SystemClock(), connections_max=4)
    yield server
    server.stop()


@pytest.fixture
def port(server):
    return server.addresses()[0].port


def assert_still_serves(shelf, server, port):
    ref = shelf.add(3_000, seed=port)
    _, catch = fetch([loopback(port)], offer(server, [ref], MigrationId("still-serves")), [ref])

    assert list(catch.blocks) == [ref.name]


# --- hostile clients -------------------------------------------------------------------------


HOSTILE_BYTES = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge frame": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 1, 0xFFFFFFFF),
    "unknown kind": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 99, 4) + b"abcd",
    "early request": encode_frame(
        FetchRequest(b"t", (FetchPart(b"h" * 32, b"c" * 16),))  # type: ignore[arg-type]
    ),
    "nested arrays": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 1, 512) + b"\xdd" * 512,
    "empty": b"",
    "endless": b"\x00" * (8 * MIB),
}


@pytest.mark.parametrize("name", HOSTILE_BYTES)
def test_a_stranger_gets_a_refusal_and_no_memory(shelf, server, port, name):
    tracemalloc.start()
    with dialled(port) as (_, sock):
        with suppress(ConnectionError):
            sock.sendall(HOSTILE_BYTES[name])
            sock.shutdown(socket.SHUT_WR)
        answer = answer_of(sock)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(answer) < 500
    assert peak < 2 * MIB
    assert_still_serves(shelf, server, port)


def test_silence_and_dripping_end_with_the_handshakes_time(shelf):
    server = serve(shelf, SystemClock(), handshake_s=0.5)
    port = server.addresses()[0].port
    began_s = time.monotonic()
    with dialled(port) as (_, silent), dialled(port) as (_, dripping):
        raw = encode_frame(Hello(TARGET, SOURCE, FINGERPRINT, b"n" * 32))
        with suppress(ConnectionError):
            for byte in raw:
                dripping.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began_s > 3:
                    pytest.fail("the server listens to drips for ever")
        assert answer_of(silent) == b""
    assert 0.4 < time.monotonic() - began_s < 3
    server.stop()


def test_silent_strangers_make_room_for_a_peer(shelf, server, port):
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]

    assert_still_serves(shelf, server, port)
    assert server.counts()["refused_overloaded"] >= 16
    for sock in strangers:
        sock.close()


def test_a_peer_that_does_not_read_is_dropped(shelf):
    server = serve(shelf, SystemClock(), patience_s=0.3)
    ref = shelf.add(24 * MIB)
    ticket = offer(server, [ref])
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, ticket, HASTE)
    channel = peer.dial(server.addresses()[0])
    peer.greet(channel)
    channel.send(FetchRequest(ticket, (part(ref),)))

    deadline_s = time.monotonic() + 5
    while not server.counts().get("broken") and time.monotonic() < deadline_s:
        time.sleep(0.02)

    assert server.counts()["broken"] == 1
    channel.close()
    server.stop()


def test_an_offset_past_the_end_is_refused(shelf, server, port):
    ref = shelf.add(1_000)
    ticket = offer(server, [ref])
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, ticket, HASTE)
    channel = peer.dial(loopback(port))
    peer.greet(channel)
    channel.send(FetchRequest(ticket, (part(ref, 1_000),)))

    assert channel.receive(Refusal).code == "bad_offset"
    channel.close()


# --- hostile servers that hold the key -------------------------------------------------------


def proven(then):
    def act(channel, sock):
        greeting = channel.receive(Hello)
        nonce = b"s" * 32
        channel.send(Challenge(nonce, prove(KEY, Role.SERVER, greeting, nonce)))
        channel.receive(Proof)
        channel.receive(FetchRequest)
        then(channel, sock)

    return act


def framed(kind, body):
    return struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, kind, len(body)) + body


SIZE = 100_000
BOMB = compression.compress_slice(bytes(64 * MIB))
RAW, ZSTD = PayloadCodec.RAW, PayloadCodec.ZSTD
LIES = {
    "longer than the block": encode_frame(PayloadHead(0, 0, SIZE + 1, SIZE + 1)),
    "longest possible": encode_frame(PayloadHead(0, 0, BLOCK_BYTES_MAX, BLOCK_BYTES_MAX)),
    "another block": encode_frame(PayloadHead(1, 0, SIZE, SIZE)),
    "another offset": encode_frame(PayloadHead(0, 1, SIZE - 1, SIZE - 1)),
    "oversize frame": struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 5, 1 << 31),
    "no message": framed(5, b"\xc1"),
    "missing fields": framed(5, b"\x80"),
    "a request": encode_frame(FetchRequest(b"t", (FetchPart(b"h" * 32, b"c" * 16),))),
    "zstd bomb": encode_frame(PayloadHead(0, 0, SIZE, len(BOMB), ZSTD)) + BOMB,
    "zstd junk": encode_frame(PayloadHead(0, 0, SIZE, 50, ZSTD)) + b"j" * 50,
    "wrong bytes": encode_frame(PayloadHead(0, 0, SIZE, SIZE)) + b"w" * SIZE,
    "endless zeros": b"\x00" * (4 * MIB),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_peer_is_found_out_in_bounded_memory(shelf, server, lie):
    ref = shelf.add(SIZE)
    ticket = offer(server, [ref])
    catch = Catch()
    tracemalloc.start()

    liar = impostor(proven(lambda _, sock: sock.sendall(LIES[lie])))
    with liar as address, pytest.raises(CorruptDataError):
        fetch([address], ticket, [ref], catch)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert catch.blocks == {}
    assert len(catch.allocated) <= 1
    assert peak < 2 * MIB


def test_the_next_block_is_asked_for_before_the_last_has_come(shelf, server):
    refs = [shelf.add(5 * MIB, seed) for seed in range(3)]
    asked = []

    def listen(channel, sock):
        greeting = channel.receive(Hello)
        channel.send(Challenge(b"s" * 32, prove(KEY, Role.SERVER, greeting, b"s" * 32)))
        channel.receive(Proof)
        asked.append(channel.receive(FetchRequest))
        sock.shutdown(socket.SHUT_RDWR)

    with impostor(listen) as address, pytest.raises(RetryLaterError):
        fetch([address], offer(server, refs), refs, streams=1)

    assert [len(request.parts) for request in asked] == [2] * HASTE.rounds


def test_a_refusal_cannot_carry_a_novel(shelf, server):
    ref = shelf.add(SIZE)
    ticket = offer(server, [ref])
    novel = framed(6, b"\x82\xa4code\xa9bad\nthing\xa7message\xa2hi")

    liar = impostor(proven(lambda _, sock: sock.sendall(novel)))
    with liar as address, pytest.raises(CorruptDataError, match="no valid frame"):
        fetch([address], ticket, [ref])
