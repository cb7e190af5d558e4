"""A stopping router lets running requests finish within its limit."""

import asyncio

import httpx2
import pytest

from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio


async def test_requests_outlasting_the_stop_get_503_without_log_noise(caplog):
    async with rig("ab") as fabric:
        for node in fabric.nodes.values():
            node.does.first_delay_s = 3600.0
        asking = asyncio.create_task(fabric.chat("hello", agent="alice"))
        await until(lambda: sum(len(node.requests) for node in fabric.nodes.values()) == 1)
        for node in fabric.nodes.values():
            node.does.first_delay_s, node.does.delay_s = 0.0, 3600.0
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
