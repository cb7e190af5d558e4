"""A client that disconnects in mid-stream ends its turn within about a step."""

import asyncio
import json
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager

import pytest

from fabric.codec import dump_json
from fabric.ids import OperationId
from fabric.keys import http_secret
from fabric.turn.generation import (
    CLUSTER_HEADER,
    COUNT_PATH,
    GENERATE_PATH,
    Delta,
    GenerateRequest,
    Sampling,
)
from node.http.routes import build_app, http_server, question_route
from node.mlx.engine import Engine
from tests.support.services import KEY, TENANT, identity_of, running
from tests.support.tiny_models import ONE_LAYER, write_model
from tests.support.waiting import wait_until

STEP_S = 0.02
STEPS_MAX = 50  # from hang-up to end; the whole turn would take half a minute
ANSWER_TOKENS = 1_500
HANG_S = 60.0
MEGABYTE = "x" * 1_000_000
RESET = struct.pack("ii", 1, 0)


def http_request(agent="mira", path=GENERATE_PATH):
    sampling = Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    who = OperationId("hang-ups"), TENANT, identity_of(agent)
    raw = dump_json(GenerateRequest(*who, sampling, prompt="the cat sat on the mat. " * 20))
    lines = [
        f"POST {path} HTTP/1.1", "host: node", f"content-length: {len(raw)}",
        f"{CLUSTER_HEADER}: {http_secret(KEY)}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + raw


def hang_up(sock, how):
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


class Serving:
    """A turn that streams without end and notes when it is closed."""

    def __init__(self, text, pause_s):
        self.sent, self.ended = 0, asyncio.Event()
        self._text, self._pause_s = text, pause_s

    async def __call__(self, _request):
        try:
            while True:
                yield Delta(self.sent, self._text)
                self.sent += 1
                await asyncio.sleep(self._pause_s)
        finally:
            self.ended.set()


@asynccontextmanager
async def listening(serve, more=()):
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(build_app(KEY, serve, more), None)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await task


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("how", "reads"),
    [("close", True), ("half", True), ("reset", True), ("close", False), ("reset", False)],
)
async def test_stream_ends_when_its_reader_hangs_up(how, reads):
    """This holds too if the reader has read nothing, so that the stream is blocked.

    A reader that stays but does not read is another case: it falls too many events behind.
    """
    serve = Serving("x", STEP_S) if reads else Serving(MEGABYTE, 0.0)
    async with listening(serve) as address:
        sock = socket.create_connection(address)
        sock.sendall(http_request())
        before = -1
        while serve.sent < 3 or (not reads and before != serve.sent):
            before = serve.sent
            await asyncio.sleep(0.2)
            if reads:
                sock.recv(1 << 16, socket.MSG_DONTWAIT)
        sent_count = serve.sent
        hang_up(sock, how)
        await asyncio.wait_for(serve.ended.wait(), HANG_S)
        sock.close()

    assert serve.sent - sent_count <= STEPS_MAX


@pytest.mark.anyio
async def test_turn_ended_before_its_first_event_is_refused():
    """Found by simulation: the agent was released while its turn waited for memory."""

    async def ended(_request):
        for event in ():
            yield event

    async with listening(ended) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(http_request())
        status = await asyncio.wait_for(reader.readline(), HANG_S)
        writer.close()

    assert status.split()[1] == b"421"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    with running(folder, str(write_model(folder / "model", ONE_LAYER))) as node_service:
        yield node_service


@pytest.fixture
def slow(monkeypatch):
    launch = Engine.launch

    def launch_slowly(*arguments):
        time.sleep(STEP_S)
        return launch(*arguments)

    monkeypatch.setattr(Engine, "launch", launch_slowly)


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_turn_over_real_sockets_ends_at_hang_up_and_is_saved(service, slow, how):
    node = service.node
    host, _, port = node.resources.endpoint.url.removeprefix("http://").rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(http_request(how))
    read = b""
    while read.count(b"\n") < 20:
        read += sock.recv(1 << 16)
    [turn] = node.live_turns
    sequence = turn._sequence
    shown = len(sequence.answer_ids)
    hang_up(sock, how)
    wait_until(lambda: not node.live_turns)
    sock.close()
    ended = len(sequence.answer_ids)
    saved = node.resources.table.get((TENANT, how)).manifest

    assert ended - shown <= STEPS_MAX
    assert saved.tokens_count >= ended, "computed tokens are saved"
    assert node.resources.engine.budget.reserved_bytes == 0
    assert all(json.loads(line) for line in read.splitlines()[10:-1] if line.startswith(b"{"))


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["close", "half", "reset"])
async def test_prompt_question_is_cancelled_by_hang_up(how):
    has_begun, ended = asyncio.Event(), asyncio.Event()

    async def count_tokens(_request):
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    route = question_route(COUNT_PATH, KEY, count_tokens)
    async with listening(None, [route]) as address:
        sock = socket.create_connection(address)
        sock.sendall(http_request(path=COUNT_PATH))
        await asyncio.wait_for(has_begun.wait(), HANG_S)
        hang_up(sock, how)
        await asyncio.wait_for(ended.wait(), HANG_S)
        sock.close()


def test_cancelled_token_count_stops_its_encoding(service, monkeypatch):
    prompts = service.node.turns.prompts
    limits, may_end = [], threading.Event()

    def encode(_text, *, limit, **_options):
        limits.append(limit)
        assert may_end.wait(HANG_S)

    monkeypatch.setattr(prompts.tokenizer, "encode", encode)
    who = OperationId("hang-ups"), TENANT, identity_of("mira")
    request = GenerateRequest(*who, Sampling(), prompt="the cat sat")
    counting = asyncio.run_coroutine_threadsafe(prompts.count(request), service._loop)
    wait_until(lambda: limits)
    assert not limits[0].is_unwanted()
    counting.cancel()
    wait_until(limits[0].is_unwanted)
    may_end.set()
