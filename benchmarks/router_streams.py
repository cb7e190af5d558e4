"""Cost of a stream in the router: CPU time per token, and time added to the first token.

A node in its own process streams answers without a model, clients in another process read them,
and the router between them runs alone in this one.
"""

import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import aiohttp
import uvicorn
from aiohttp import web

from benchmarks.router_fleet import MODEL, BenchFleet, start_fleet
from fabric.codec import from_plain, parse_json
from fabric.ids import NodeName
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    GENERATE_PATH,
    Admitted,
    CacheTier,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    MatchKind,
    encode_event,
)
from router.app import build_app
from router.fleet.node_http import NodeHttp
from router.serve import http_config

STREAMS, QUICK_STREAMS = 200, 20
TOKENS: Final = (10, 60)  # of each stream: the extra cost of the longer ones is their tokens' cost
QUICK_TOKENS: Final = (5, 15)
TOKEN_S: Final = 0.1  # between the tokens of a stream
START_S: Final = 0.003  # between two streams: a router refuses hundreds at one moment (429)
PROBES, QUICK_PROBES = 200, 20  # sequential requests of one token
NODE: Final = NodeName("node-0000")  # as MemoryNode names the first one
_SPAWN: Final = multiprocessing.get_context("spawn")


async def measure_streams(http: NodeHttp, *, quick: bool) -> dict[str, float]:
    """Return the CPU time of a streamed token [us] and the added times to first tokens [ms]."""
    streams, probes = (QUICK_STREAMS, QUICK_PROBES) if quick else (STREAMS, PROBES)
    tokens = QUICK_TOKENS if quick else TOKENS
    with _process(_serve_node) as node:
        node_url = await _receive(node)
        async with _serving(http, node_url) as url:
            with _process(_ask, url) as clients:
                quiet_s = await _request(clients, ("probe", probes, 0))
                cpu_s = []
                for count in tokens:
                    began_s = time.process_time()
                    await _request(clients, ("stream", streams, count))
                    cpu_s.append(time.process_time() - began_s)
                busy_s = await _request(clients, ("probe", probes, streams))
    added_tokens = streams * (tokens[1] - tokens[0])
    return {
        "streams": float(streams),
        "CPU per token [us]": 1e6 * (cpu_s[1] - cpu_s[0]) / added_tokens,
        "CPU per request [ms]": 1e3 * cpu_s[0] / streams,
        "added to the first token, p50 [ms]": 1e3 * statistics.median(quiet_s),
        "added to the first token, p99 [ms]": 1e3 * _p99(quiet_s),
        "added beside the streams, p50 [ms]": 1e3 * statistics.median(busy_s),
        "added beside the streams, p99 [ms]": 1e3 * _p99(busy_s),
    }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def _process(work: Any, *arguments: Any) -> Any:
    """Run a function in a process, and yield the connection to it."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


async def _receive(connection: Connection) -> Any:
    return await asyncio.to_thread(connection.recv)


async def _request(connection: Connection, order: tuple[str, int, int]) -> Any:
    connection.send(order)
    return await _receive(connection)


# --- the router -----------------------------------------------------------------------------------


@asynccontextmanager
async def _serving(http: NodeHttp, node_url: str) -> AsyncIterator[str]:
    """Serve a router with one node, whose turns go to another process."""
    settings = RouterSettings()
    fleet = await start_fleet(http, 1, 0, 0, settings, http_url=node_url)
    fleet.clock.release()
    app = build_app(settings, fleet.services)
    config = http_config(app)
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(fleet.services.run())]
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn sends no event
            await asyncio.sleep(0.01)
        await _settle(fleet)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _settle(fleet: BenchFleet) -> None:
    while not fleet.services.fleet.membership.is_settled():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)


# --- the node -------------------------------------------------------------------------------------


def _serve_node(router: Connection) -> None:
    """Stream answers until terminated."""
    asyncio.run(_run_node(router))


async def _run_node(router: Connection) -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(GENERATE_PATH, _generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    router.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


async def _generate(request: web.Request) -> web.StreamResponse:
    """Stream an answer whose first token has the times of the request's arrival and its own."""
    came_s = time.monotonic()
    turn = from_plain(GenerateRequest, parse_json(await request.read()), "request")
    assert turn.identity.agent is not None, "the request names no agent"
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    agent, epoch, tokens = turn.identity.agent, turn.epoch or 1, turn.sampling.max_tokens
    admitted = Admitted(agent, NODE, epoch, CacheTier.COLD, MatchKind.NONE, 100, 0, "new")
    await response.write(encode_event(admitted))
    draw = random.Random(agent)
    with suppress(ConnectionError):  # the client left
        for number in range(tokens):
            text = f"{came_s} {time.monotonic()} " if number == 0 else "word "
            await response.write(encode_event(Delta(number, text)))
            if number + 1 < tokens:
                await asyncio.sleep(TOKEN_S * draw.uniform(0.8, 1.2))
        await response.write(encode_event(Finished(FinishReason.LENGTH, tokens)))
    return response


# --- the clients ----------------------------------------------------------------------------------


def _ask(orders: Connection, url: str) -> None:
    """Carry out orders: streams at once, or single requests beside streams."""
    asyncio.run(_carry_out(orders, url))


async def _carry_out(orders: Connection, url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        serial = 0
        while True:
            kind, count, more = await _receive(orders)
            if kind == "stream":
                streams = await _start(session, url, f"s{serial}", count, more)
                orders.send(await asyncio.gather(*streams))
            else:
                orders.send(await _probe(session, url, serial, count, more))
            serial += count + more


async def _probe(
    session: aiohttp.ClientSession, url: str, serial: int, count: int, beside: int
) -> list[float]:
    """Return the added seconds of single requests, while `beside` streams run."""
    streams = await _start(session, url, f"b{serial}", beside, 1 << 20)
    if streams:
        await asyncio.sleep(20 * TOKEN_S)
    added_s = [await _stream(session, url, f"p{serial + n}", 1) for n in range(count)]
    assert not any(stream.done() for stream in streams), "the streams run beside the requests"
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return added_s


async def _start(
    session: aiohttp.ClientSession, url: str, name: str, count: int, tokens: int
) -> list[asyncio.Task[float]]:
    """Start streams, one after the other."""
    streams = []
    for number in range(count):
        stream = _stream(session, url, f"{name}-{number}", tokens)
        streams.append(asyncio.create_task(stream))
        await asyncio.sleep(START_S)
    return streams


async def _stream(session: aiohttp.ClientSession, url: str, agent: str, tokens: int) -> float:
    """Read one answer; return the seconds to its first token without the node's own."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{agent} asks"}],
        "max_tokens": tokens,
        "stream": True,
    }
    sent_s, added_s = time.monotonic(), None
    headers = {"x-agent-id": agent}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if added_s is None and b'"content":"' in line.replace(b" ", b""):
                came_s = time.monotonic()
                text = json.loads(line.removeprefix(b"data:"))["choices"][0]["delta"]["content"]
                if text:
                    at_node_s, from_node_s = map(float, text.split())
                    added_s = (came_s - sent_s) - (from_node_s - at_node_s)
    assert added_s is not None, "the answer has no token"
    return added_s
