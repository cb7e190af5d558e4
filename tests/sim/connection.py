"""The router's HTTP client as HttpNodeLink uses it, over simulated connections."""

import asyncio
from http import HTTPStatus

from fabric.codec import dump_json, from_plain, parse_json, to_plain
from fabric.errors import FabricError
from fabric.generation import GenerateRequest, encode_event
from node.http_server import error_reply
from tests.sim.network import Pipe


class SimSession:
    """Opens one connection per request; the host part of the URL names the node."""

    def __init__(self, world, connections):
        self._world = world
        self._connections = connections

    async def post(self, url, *, data, headers, allow_redirects):
        name = url.split("/")[2]
        response = SimResponse(self._world.network, "router", name)
        self._connections.append(response)
        response.requests.put(data)
        self._world.nodes[name].accept(response)
        response.status = int(await response.content.pipe.take())
        return response


class SimContent:
    """The body, as it arrives."""

    def __init__(self, pipe):
        self.pipe = pipe

    async def readany(self):
        return await self.pipe.take()

    async def read(self, limit):
        return (await self.pipe.take())[:limit]


class SimResponse:
    """Both directions of a connection: the body one way, hanging up the other."""

    def __init__(self, network, client, server):
        self.status = 0
        self.content = SimContent(Pipe(network, server, client))
        self.requests = Pipe(network, client, server)
        self._is_closed = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self.requests.put(b"")


async def converse(node, response):
    """Serve a connection until its client hangs up or breaks away."""
    try:
        request = await response.requests.take()
        serving = asyncio.create_task(_serve(node, request, response.content.pipe))
        hanging_up = asyncio.create_task(response.requests.take())
        await asyncio.wait({serving, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, hanging_up):
            task.cancel()
        await asyncio.gather(serving, hanging_up, return_exceptions=True)
    except ConnectionResetError:
        return


async def _serve(node, request, out):
    """Answer one request as the node's HTTP server does."""
    asked = from_plain(GenerateRequest, parse_json(request), "request")
    events = node.generate(asked)
    try:
        first = await anext(events)
    except FabricError as error:
        out.put(str(int(error.status)).encode())
        out.put(dump_json({"error": to_plain(error_reply(error))}))
        out.put(b"")
        return
    out.put(str(int(HTTPStatus.OK)).encode())
    out.put(encode_event(first))
    try:
        async for event in events:
            out.put(encode_event(event))
        out.put(b"")
    finally:
        await events.aclose()
