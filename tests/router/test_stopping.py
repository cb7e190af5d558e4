"""A stopping router lets running requests finish within its limit."""

import asyncio

import httpx2
import pytest

from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio


async def test_requests_outlasting_the_stop_get_503_without_log_noise(caplog):
    async with rig("ab") as fabric:
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 3600.0
        asking = asyncio.create_task(fabric.chat("hello", agent="alice"))
        await until(lambda: sum(len(node.requests) for node in fabric.nodes.values()) == 1)
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s, node.behaviour.delay_s = 0.0, 3600.0
        streaming = asyncio.create_task(fabric.chat("one two three", agent="bob", stream=True))
        await until(lambda: sum(node.running for node in fabric.nodes.values()) > 0)
        fabric.server.should_exit = True
        answer = await asking
        with pytest.raises(httpx2.TransportError):
            await streaming

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "stopping"
    assert int(answer.headers["retry-after"]) >= 1
    assert [record for record in caplog.records if record.exc_info] == []


async def test_connection_accepted_before_the_stop_gets_its_first_answer():
    async with rig("a") as fabric:
        parts = httpx2.URL(fabric.url)
        reader, writer = await asyncio.open_connection(parts.host, parts.port)
        unused = await asyncio.open_connection(parts.host, parts.port)
        await until(lambda: len(fabric.server.server_state.connections) == 2)
        fabric.server.should_exit = True
        await until(lambda: not fabric.server.servers[0].is_serving())
        writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        answer = await reader.read()
        rest = await unused[0].read()
        for each in (writer, unused[1]):
            each.close()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    assert rest == b""
