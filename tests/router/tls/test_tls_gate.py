"""Unauthenticated clients at a TLS port before their handshake."""

import asyncio
import json
import socket
import ssl
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import node.http.routes
import router.serve
from fabric.hosting import guarded_connection, tls_gate
from fabric.hosting.connection_table import ConnectionSlots, ConnectionTable
from fabric.settings import TlsSettings
from router.tls.contexts import read_router_keys
from tests.support.keys import make_keys
from tests.support.waiting import wait_until

FEW = ConnectionSlots(12, 8, admitted=6)
HANG_S = 60
GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def echo(request):
    body = await request.body()
    return JSONResponse({"scheme": request.url.scheme, "bytes": len(body)})


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys")).path


@pytest.fixture(params=[router.serve.http_config, node.http.routes.http_config])
def server(request, keys, monkeypatch):
    tables = []
    monkeypatch.setattr(
        "fabric.hosting.http_server.ConnectionTable",
        lambda slots: tables.append(ConnectionTable(slots)) or tables[-1],
    )
    context = read_router_keys(keys).client_facing(TlsSettings())
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    served = uvicorn.Server(request.param(app, FEW, tls=context))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    thread = threading.Thread(target=lambda: asyncio.run(served.serve([listener])), daemon=True)
    thread.start()
    served.address, served.table = listener.getsockname(), tables[0]
    yield served
    served.should_exit = served.force_exit = True
    thread.join(HANG_S)


def client_context(keys):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "ca.pem")
    return context


def tls_to(server, keys):
    sock = socket.create_connection(server.address, timeout=HANG_S)
    return client_context(keys).wrap_socket(sock, server_hostname="127.0.0.1")


def answer(sock, request=GET):
    sock.sendall(request)
    raw = b""
    while b"}" not in raw and (chunk := sock.recv(65536)):
        raw += chunk
    return raw


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_requests_are_answered_and_connections_released(server, keys):
    body = b"x" * 3_000_000
    head = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body)
    with tls_to(server, keys) as sock:
        first, second = answer(sock), answer(sock, head + body)
        assert len(server.table) == 1

    assert json.loads(first.partition(b"\r\n\r\n")[2]) == {"scheme": "https", "bytes": 0}
    assert json.loads(second.partition(b"\r\n\r\n")[2])["bytes"] == len(body)
    wait_until(lambda: len(server.table) == 0)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01", b"\x16" * 5000])
def test_missing_handshake_times_out(server, keys, monkeypatch, data):
    monkeypatch.setattr(tls_gate, "HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_connection(server.address, timeout=HANG_S) as sock:
        sock.sendall(data)
        wait_until(lambda: is_closed(sock))

    wait_until(lambda: len(server.table) == 0)
    with tls_to(server, keys) as sock:
        assert b"200 OK" in answer(sock)


@pytest.mark.parametrize("data", [GET, b"\x00" * 5000])
def test_clear_text_client_gets_https_required(server, keys, data):
    with socket.create_connection(server.address, timeout=HANG_S) as sock:
        raw = answer(sock, data)
        assert is_closed(sock)

    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == tls_gate.HTTPS_REQUIRED
    wait_until(lambda: len(server.table) == 0)


def test_silent_connections_do_not_block_tls_clients(server, keys):
    silent = [socket.create_connection(server.address, timeout=HANG_S) for _ in range(40)]
    try:
        wait_until(lambda: sum(map(has_ended, silent)) >= 32)
        assert len(server.table) <= FEW.unauthenticated_per_source
        with tls_to(server, keys) as sock:
            assert b"200 OK" in answer(sock)
    finally:
        for sock in silent:
            sock.close()


def has_ended(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_slow_headers_are_cut_over_tls(server, keys, monkeypatch):
    monkeypatch.setattr(guarded_connection, "HEAD_S", 0.3)
    with tls_to(server, keys) as sock:
        assert b"slow_headers" in answer(sock, GET[:-4])
