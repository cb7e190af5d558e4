"""The router opens few connections to one node at a time."""

import asyncio
import ssl

import aiohttp
import pytest

from router.fleet.node_http import NodeHttp, Use
from router.limits import HANDSHAKES_PER_NODE_MAX
from tests.router.rig import until

pytestmark = pytest.mark.anyio


class SlowHandshakes:
    """A server that counts handshakes without a reply, and ends all on request."""

    def __init__(self):
        self.open = []
        self.accepted_count = 0
        self.ends_at_once = False

    async def __call__(self, reader, writer):
        self.open.append(writer)
        self.accepted_count += 1
        await reader.read(1)  # the handshake's first byte
        if self.ends_at_once:
            self.end_all()

    def end_all(self):
        while self.open:
            self.open.pop().transport.abort()


async def test_concurrent_handshakes_per_node_are_bounded():
    """With hundreds at once, each would exceed its time limit."""
    slow, turns_count = SlowHandshakes(), 3 * Use.STREAM.value  # more than are kept
    http = NodeHttp(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    turns = [
        asyncio.create_task(http.post(url, "/", b"", {}, None, Use.STREAM))
        for _ in range(turns_count)
    ]
    try:
        await until(lambda: slow.accepted_count >= HANDSHAKES_PER_NODE_MAX)
        await asyncio.sleep(0.2)  # enough for all to arrive
        assert slow.accepted_count == HANDSHAKES_PER_NODE_MAX
        slow.ends_at_once = True
        slow.end_all()
        errors = await asyncio.gather(*turns, return_exceptions=True)
    finally:
        await http.close()
        server.close()

    assert slow.accepted_count == turns_count
    assert all(isinstance(error, aiohttp.ClientOSError) for error in errors)
