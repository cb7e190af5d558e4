"""Unauthenticated connections at the HTTP ports of router and node, over real sockets."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import node.http.routes
import router.serve
from fabric.hosting import guarded_connection, lingering
from fabric.hosting.connection_table import ConnectionSlots
from fabric.hosting.guarded_connection import admit
from tests.support.waiting import wait_until

FEW = ConnectionSlots(12, 8, admitted=6)
HANG_S = 60
OK = b"HTTP/1.1 200"
SERVERS = [
    pytest.param(router.serve.http_config, id="router"),
    pytest.param(node.http.routes.http_config, id="node"),
]


async def known(request):
    admit(request.scope, request.headers["x-owner"])
    return PlainTextResponse("known")


async def echo(request):
    return PlainTextResponse(str(len(await request.body())))


async def unread(request):
    return PlainTextResponse("unread")


async def headers(request):
    await request.body()
    return PlainTextResponse(",".join(sorted(request.headers)))


class Endless:
    """Application that streams, a little at a time, until the client disconnects."""

    def __init__(self):
        self.began, self.ended = threading.Event(), threading.Event()

    async def __call__(self, _request):
        return StreamingResponse(self._parts())

    async def _parts(self):
        try:
            while True:
                yield b"part"
                self.began.set()
                await asyncio.sleep(0.01)
        finally:
            self.ended.set()


ENDLESS = Endless()
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ROUTES = [
    Route("/endless", ENDLESS.__call__),
    Route("/known", known),
    Route("/echo", echo, methods=["POST"]),
    Route("/unread", unread, methods=["POST"]),
    Route("/headers", headers, methods=["POST"]),
    Route("/", unread),
]


class Server:
    def __init__(self, config, slots, more=()):
        self.server = uvicorn.Server(config(Starlette(routes=[*ROUTES, *more]), slots))
        self.table = self.server.config.http.table
        self.address = None
        self._clients = []
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(HANG_S)

    def _run(self):
        async def serve():
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)
            self.address = listener.getsockname()
            task = asyncio.create_task(self.server.serve([listener]))
            while not self.server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            self._up.set()
            await task

        asyncio.run(serve())

    def connect(self, data=b""):
        sock = socket.create_connection(self.address, timeout=HANG_S)
        self._clients.append(sock)
        sock.sendall(data)
        return sock

    def stop(self):
        for sock in self._clients:  # even if a test failed, as a leak would fail a later one
            sock.close()
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(HANG_S)


@contextmanager
def served(config, slots=None, more=()):
    server = Server(config, slots, more)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=SERVERS)
def config(request):
    return request.param


def read_all(sock):
    """Read until the other side closes."""
    raw = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            raw += part
    return raw


def answer_of(sock):
    """Read one whole answer."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += sock.recv(1) or pytest.fail(f"closed after {raw!r}")
    size = int(raw.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while not raw.partition(b"\r\n\r\n")[2][size - 1 :]:
        raw += sock.recv(1) or pytest.fail(f"closed after {raw!r}")
    return raw


def head(path="/", method="GET", *lines):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def is_closed(sock):
    sock.settimeout(0)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_unterminated_header_gets_431_at_limit(config):
    with served(config) as server, server.connect(b"GET / HTTP/1.1\r\nx: ") as sock:
        with suppress(OSError):
            sock.sendall(b"y" * (8 << 20))
            sock.shutdown(socket.SHUT_WR)  # otherwise the server lingers for more data
        answer = read_all(sock)

        assert answer.startswith(b"HTTP/1.1 431")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_large"
        assert error["type"] == "invalid_request_error"
        wait_until(lambda: len(server.table) == 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("/", "GET", *[f"x{i}: y" for i in range(99)]), 200),
        (head("/", "GET", *[f"x{i}: y" for i in range(100)]), 431),
        (head("/", "GET", *[f"x{i}: {'y' * 2000}" for i in range(40)]), 431),
        (head("/", "GET", f"x: {'y' * 60_000}"), 200),
        (head("/?" + "y" * 16_000), 200),
        (head("/?" + "y" * 17_000), 414),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_request_head_over_limit_is_refused(config, data, status):
    with served(config) as server, server.connect(data) as sock:
        answer = answer_of(sock)

        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        if status != 200:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert read_all(sock) == b""


CHUNKED = head("/headers", "POST", "transfer-encoding: chunked")


@pytest.mark.parametrize(
    "tail",
    [
        b"0\r\nlate: " + b"y" * 200_000,
        b"0\r\n" + b"".join(b"late%d: y\r\n" % i for i in range(200)) + b"\r\n",
        b"1;" + b"e" * 200_000,
    ],
    ids=["one trailer", "many trailers", "chunk extension"],
)
def test_trailers_and_chunk_extensions_are_bounded(config, tail):
    with served(config) as server, server.connect(CHUNKED) as sock:
        with suppress(ConnectionError):
            sock.sendall(tail)

        assert read_all(sock).startswith(b"HTTP/1.1 431")


def test_refused_body_gets_no_100_continue(config, caplog):
    """The application reads the body after the refusal was written."""
    expecting = head("/echo", "POST", "transfer-encoding: chunked", "expect: 100-continue")
    with served(config) as server, server.connect(expecting + b"no size\r\n") as sock:
        answer = read_all(sock)

    assert answer.startswith(b"HTTP/1.1 400")
    assert b"100 Continue" not in answer
    assert [r.exc_info[0] for r in caplog.records] == [ClientDisconnect]  # no write failed


def test_trailers_are_not_taken_as_headers(config):
    late = CHUNKED + b"1\r\nx\r\n0\r\nx-agent-id: late\r\n\r\n"
    with served(config) as server, server.connect(late) as sock:
        answer = answer_of(sock)

    assert answer.startswith(OK)
    assert b"x-agent-id" not in answer


def test_incomplete_request_head_times_out(config, monkeypatch):
    monkeypatch.setattr(guarded_connection, "HEAD_S", 0.3)
    monkeypatch.setattr(guarded_connection, "SWEEP_S", 0.05)
    with served(config) as server:
        silent = server.connect()
        partial = server.connect(b"GET / HTTP/1.1\r\nhost:")
        served_once = server.connect(head())
        second = server.connect(head("/known", "GET", "x-owner: a"))
        kept = server.connect(head("/known", "GET", "x-owner: a"))
        for sock in (served_once, second, kept):
            assert answer_of(sock).startswith(OK)
        second.sendall(b"GET /kn")
        answers = [read_all(sock) for sock in (silent, partial, served_once, second)]

        assert answers[0].startswith(b"HTTP/1.1 408")
        assert answers[1].startswith(b"HTTP/1.1 408")
        assert answers[2] == b"", "an unauthenticated client's connection ends with its answer"
        assert answers[3].startswith(b"HTTP/1.1 408")
        assert not is_closed(kept), "an authenticated client may keep its connection"
        for sock in (silent, partial, served_once, second, kept):
            sock.close()


def test_unread_body_does_not_keep_its_connection(config, monkeypatch):
    monkeypatch.setattr(lingering, "LINGER_S", 0.3)
    monkeypatch.setattr(guarded_connection, "SWEEP_S", 0.05)
    with served(config) as server:
        with server.connect(head("/unread", "POST", "content-length: 100") + b"x") as sock:
            answer = read_all(sock)

        assert answer.startswith(OK)


def test_unauthenticated_connections_are_dropped_first(config):
    with served(config, FEW) as server:
        mine = server.connect(head("/known", "GET", "x-owner: a"))
        assert answer_of(mine).startswith(OK)
        idle = [server.connect() for _ in range(40)]
        wait_until(lambda: len(server.table) <= FEW.unauthenticated_per_source + 1)
        mine.sendall(head("/known", "GET", "x-owner: a"))
        late = server.connect(head("/known", "GET", "x-owner: b"))

        assert answer_of(mine).startswith(OK)
        assert answer_of(late).startswith(OK)
        wait_until(
            lambda: sum(not is_closed(sock) for sock in idle) <= FEW.unauthenticated_per_source
        )
        for sock in (mine, late, *idle):
            sock.close()
        table = server.table  # in another thread, which may be inside the call
        wait_until(lambda: not (len(table) or table._unauthenticated or table._admitted))
        wait_until(lambda: table._heads_bytes == 0)


def test_unauthenticated_connection_gets_grace_time_for_its_request(config, monkeypatch):
    monkeypatch.setattr("fabric.hosting.connection_table.UNAUTHENTICATED_S", HANG_S)
    with served(config, FEW) as server:
        slow = server.connect()
        idle = [server.connect() for _ in range(FEW.unauthenticated - 1)]
        wait_until(lambda: len(server.table) == FEW.unauthenticated)
        slow.sendall(head("/known", "GET", "x-owner: a"))
        assert answer_of(slow).startswith(OK)
        idle += [server.connect() for _ in range(4 * FEW.unauthenticated)]
        wait_until(lambda: sum(not is_closed(sock) for sock in idle) <= 2 * FEW.unauthenticated)
        assert not is_closed(slow)
        for sock in (slow, *idle):
            sock.close()


def test_owner_with_most_idle_connections_loses_them_first(config):
    with served(config, FEW) as server:
        rare = server.connect(head("/known", "GET", "x-owner: rare"))
        assert answer_of(rare).startswith(OK)
        many = []
        for _ in range(20):
            many.append(server.connect(head("/known", "GET", "x-owner: many")))
            assert answer_of(many[-1]).startswith(OK)

        assert not is_closed(rare)
        assert not is_closed(many[-1])
        wait_until(lambda: sum(not is_closed(sock) for sock in many) < FEW.admitted)
        for sock in (rare, *many):
            sock.close()


def test_incomplete_request_heads_are_bounded_in_total(config, monkeypatch):
    monkeypatch.setattr("fabric.hosting.connection_table.HEADS_BYTES_MAX", 200_000)
    with served(config) as server:
        socks = [server.connect(b"GET / HTTP/1.1\r\nx: " + b"y" * 50_000) for _ in range(12)]
        wait_until(lambda: 0 < server.table._heads_bytes <= 200_000 and len(server.table) <= 4)

        with server.connect(head()) as sock:
            assert answer_of(sock).startswith(OK)
        for sock in socks:
            sock.close()


def test_pipelined_requests_are_bounded(config):
    with served(config) as server, server.connect(head() * 2000) as sock:
        answer = read_all(sock)

    assert answer.count(OK) <= guarded_connection.PIPELINED_MAX + 1


def test_pipelined_requests_are_answered_in_order(config):
    both = head() + head("/known", "GET", "x-owner: a", "connection: close")
    with served(config) as server, server.connect(both) as sock:
        answer = read_all(sock)

    assert answer.count(OK) == 2
    assert answer.index(b"unread") < answer.index(b"known")


def test_stalled_reader_is_dropped(config, monkeypatch):
    monkeypatch.setattr(guarded_connection, "WRITE_STALL_S", 0.3)
    monkeypatch.setattr(guarded_connection, "SWEEP_S", 0.05)
    big = b"z" * (32 << 20)

    async def large(request):
        admit(request.scope, "a")
        return PlainTextResponse(big)

    monkeypatch.setitem(globals(), "ROUTES", [Route("/large", large)])
    with served(config) as server, server.connect(head("/large")) as sock:
        wait_until(lambda: len(server.table) == 1)
        wait_until(lambda: len(server.table) == 0)
        assert len(read_all(sock)) < len(big)


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_stream_ends_with_its_client_despite_pipelined_requests(config, behind, caplog):
    ENDLESS.began.clear()
    ENDLESS.ended.clear()
    with served(config) as server:
        sock = server.connect(GET.replace(b"GET / ", b"GET /endless ") + GET * behind)
        assert ENDLESS.began.wait(HANG_S)
        sock.close()
        assert ENDLESS.ended.wait(HANG_S)
    assert [r.getMessage() for r in caplog.records if r.name == "macfabric.http"] == []
