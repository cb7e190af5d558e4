"""A client that sends a whole body before it reads still gets the answer that refuses it.

The servers of router and node run in a separate process, over HTTP and HTTPS.
"""

import socket

import pytest

from fabric.hosting.limits import HEADERS_MAX
from fabric.limits import MIB
from tests.support.keys import make_keys
from tests.support.refusing_server import TEXT, refusing_server

PART = b"a" * MIB


@pytest.fixture(scope="module", params=["router", "router tls", "node", "node tls"])
def server(request, tmp_path_factory):
    name, _, tls = request.param.partition(" ")
    keys = make_keys(tmp_path_factory.mktemp("keys")).path if tls else None
    with refusing_server(name, keys) as running:
        yield running


def head(*lines, version="1.1"):
    return "\r\n".join([f"POST / HTTP/{version}", "host: here", *lines, "", ""]).encode()


def read_to_end(sock):
    raw = b""
    while part := sock.recv(65536):
        raw += part
    return raw


def send_all(server, start, body_mib):
    with server.connect() as sock:
        sock.sendall(start)
        for _ in range(body_mib):
            sock.sendall(PART)
        return read_to_end(sock)


@pytest.mark.parametrize("body_mib", [1, 8, 64])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_client_with_connection_close_reads_refusal(server, body_mib, version):
    start = head("connection: close", f"content-length: {body_mib * MIB}", version=version)
    raw = send_all(server, start, body_mib)
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert raw.endswith(TEXT)


def test_chunked_body_is_discarded_to_its_end(server):
    with server.connect() as sock:
        sock.sendall(head("connection: close", "transfer-encoding: chunked"))
        for _ in range(8):
            sock.sendall(b"%x\r\n%s\r\n" % (MIB, PART))
        sock.sendall(b"0\r\n\r\n")
        assert read_to_end(sock).endswith(TEXT)


def test_kept_connection_serves_next_request_after_refusal(server):
    body = b"content-length: %d" % (8 * MIB)
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(head(body.decode()))
            for _ in range(8):
                sock.sendall(PART)
        sock.sendall(head("connection: close"))
        raw = read_to_end(sock)
    assert raw.count(b"HTTP/1.1 413 ") == 3
    assert raw.count(TEXT) == 3


def test_client_expecting_100_is_refused_before_it_sends(server):
    with server.connect() as sock:
        sock.sendall(head(f"content-length: {64 * MIB}", "expect: 100-continue"))
        raw = read_to_end(sock)
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in raw
    assert raw.endswith(TEXT)


def test_client_with_too_many_headers_reads_431(server):
    lines = [f"x-{number}: y" for number in range(HEADERS_MAX)]
    raw = send_all(server, head(*lines, f"content-length: {8 * MIB}"), 8)
    assert raw.startswith(b"HTTP/1.1 431 ")


def test_clear_text_on_tls_port_gets_400(server):
    if server.keys is None:
        pytest.skip("this server speaks no TLS")
    with server.connect(is_clear=True) as sock:
        sock.sendall(head(f"content-length: {8 * MIB}"))
        for _ in range(8):
            sock.sendall(b"\x16" + PART[1:])
        raw = read_to_end(sock)
    assert raw.startswith(b"HTTP/1.1 400 ")
    assert b"https_required" in raw


def test_server_survives_clients_that_reset_mid_upload(server):
    for _ in range(8):
        with server.connect() as sock:
            sock.sendall(head("connection: close", f"content-length: {64 * MIB}") + PART)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert send_all(server, head("connection: close"), 0).endswith(TEXT)
