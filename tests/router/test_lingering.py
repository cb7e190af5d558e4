"""Discarding a refused client's data is limited in bytes, seconds and connections."""

import socket
from contextlib import ExitStack, suppress

import pytest

from fabric.hosting import guarded_connection, lingering
from fabric.limits import KIB, MIB
from tests.router.test_http_guard import (
    HANG_S,
    OK,
    SERVERS,
    answer_of,
    head,
    is_closed,
    read_all,
    served,
)
from tests.support.waiting import wait_until

ENDLESS = head("/unread", "POST", "connection: close", "transfer-encoding: chunked")
CHUNK = b"%x\r\n%s\r\n" % (16 * KIB, b"a" * 16 * KIB)


@pytest.fixture(params=SERVERS)
def server(request, monkeypatch):
    monkeypatch.setattr(guarded_connection, "SWEEP_S", 0.05)
    with served(request.param) as running:
        yield running


def until_nothing_lingers(server):
    wait_until(lambda: len(server.table) == 0 and not server.table.lingering._bytes)


@pytest.mark.parametrize("more", ["connection: close", "connection: keep-alive"])
def test_dripping_client_is_cut(server, monkeypatch, more):
    monkeypatch.setattr(lingering, "LINGER_S", 0.3)
    with server.connect(head("/unread", "POST", more, "content-length: 100")) as sock:
        assert answer_of(sock).startswith(OK)
        sock.settimeout(0.02)
        with suppress(ConnectionError):
            for _ in range(100):
                sock.sendall(b"x")
                with suppress(TimeoutError):
                    if sock.recv(1) == b"" and more.endswith("alive"):
                        break
        sock.settimeout(HANG_S)
        until_nothing_lingers(server)


def test_endless_body_is_cut(server, monkeypatch):
    monkeypatch.setattr(lingering, "LINGER_BYTES_MAX", 2 * MIB)
    sent_bytes = 0
    with server.connect(ENDLESS) as sock, suppress(ConnectionError):
        while sent_bytes < 1024 * MIB:
            sock.sendall(CHUNK)
            sent_bytes += len(CHUNK)
    assert sent_bytes < 256 * MIB  # the sockets' buffers take some of it
    until_nothing_lingers(server)


def test_longest_lingering_connection_is_closed_first(server, monkeypatch):
    monkeypatch.setattr(lingering, "LINGERING_MAX", 4)
    with ExitStack() as opened:
        socks = []
        for _ in range(8):
            socks.append(opened.enter_context(server.connect(ENDLESS + CHUNK)))
            assert answer_of(socks[-1]).startswith(OK)
        wait_until(lambda: len(server.table) == 4)
        for sock in socks[4:]:  # these are still read
            sock.sendall(b"0\r\n\r\n")
            read_all(sock)
        until_nothing_lingers(server)


def test_total_discard_rate_is_bounded(server, monkeypatch):
    monkeypatch.setattr(lingering, "LINGERING_BYTES_PER_S_MAX", 256 * KIB)
    with server.connect(head("/unread", "POST", f"content-length: {4 * MIB}")) as sock:
        sock.sendall(b"a" * 4 * MIB)
        assert answer_of(sock).startswith(OK)
        sock.sendall(head("/unread", "POST", "connection: close"))
        assert read_all(sock).startswith(OK)
    until_nothing_lingers(server)


def test_client_that_disconnects_mid_body_leaves_nothing(server):
    with server.connect(ENDLESS + CHUNK) as sock:
        assert answer_of(sock).startswith(OK)
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_closed(sock))
    until_nothing_lingers(server)
