"""HTTP between router and nodes over simulated connections, answered by the node's own application.

Every request has its own connection; `tests/router/fleet/test_node_http.py` tests kept ones.

A request travels as its head, parts of its body and an end; an answer as its status and parts of
its body. An empty part ends a body, or hangs up.
"""

import asyncio
from http import HTTPStatus

from starlette.types import Message

from tests.sim.network import Pipe

END = ("end", b"")


class SimSession:
    """A session of one connection per request; the host part of the URL names the node."""

    def __init__(self, world, connections, client="router"):
        self._world = world
        self._connections = connections
        self._client = client

    async def post(self, url, path, data, headers, *_):
        name = url.split("/")[2]
        response = SimResponse(self._world.network, self._client, name)
        self._connections.append(response)
        response.requests.put(("head", (path, dict(headers))))
        self._world.nodes[name].accept(response)
        sending = asyncio.create_task(response.send(data))
        try:
            response.status = int(await response.content.pipe.take())
        except asyncio.CancelledError:
            response.close()  # as aiohttp does for a client that gives up early
            raise
        finally:
            if response.status != HTTPStatus.OK:
                sending.cancel()
        return response

    def release(self, response):
        response.close()

    let_end = release

    async def head(self, *_, **__):
        """Raise: no connection is opened ahead of its request."""
        message = "a simulated connection serves one request"
        raise OSError(message)


class SimContent:
    """The body of a response, as it arrives."""

    def __init__(self, pipe):
        self.pipe = pipe

    async def readany(self):
        return await self.pipe.take()

    def set_exception(self, error):
        self.pipe.fail(error)

    async def read(self, limit):
        whole = b"".join([part async for part in self.iter_any()])
        return whole[:limit]

    async def iter_any(self):
        while part := await self.pipe.take():
            yield part


class SimResponse:
    """Both directions of a connection: a request with its hang-up, and the response."""

    def __init__(self, network, client, server):
        self.status = 0
        self.content = SimContent(Pipe(network, server, client))
        self.requests = Pipe(network, client, server)
        self._is_closed = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()

    async def send(self, data):
        """Send a request's body."""
        if isinstance(data, bytes):
            self.requests.put(("body", data))
        else:
            async for part in data:
                self.requests.put(("body", part))
                await asyncio.sleep(0.001)
        self.requests.put(END)

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self.requests.put(b"")


async def converse(app, response):
    """Have the node's application answer the one request of a connection."""
    requests, out = response.requests, response.content.pipe
    try:
        _, (path, headers) = await requests.take()
    except (ConnectionResetError, TypeError, ValueError):  # broken or hung up
        return
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("router", 1),
        "server": ("node", 1),
    }
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        try:
            part = await requests.take()
        except ConnectionResetError:
            return {"type": "http.disconnect"}
        if not part or is_read:
            return {"type": "http.disconnect"}
        is_read = part is END
        return {"type": "http.request", "body": part[1], "more_body": part is not END}

    async def send(message: Message) -> None:
        if requests.is_broken or requests.arrived[:1] == [b""]:
            return  # no reader is left
        if message["type"] == "http.response.start":
            out.put(str(message["status"]).encode())
            return
        if message.get("body"):
            out.put(message["body"])
        if not message.get("more_body", False):
            out.put(b"")

    await app(scope, receive, send)
