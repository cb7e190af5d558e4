"""A stopping router lets running requests finish within its limit."""

import asyncio

import httpx2
import pytest

from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio


async def test_requests_that_outlast_the_end_are_told_so_and_fill_no_log(caplog):
    async with rig("ab") as made:
        for node in made.nodes.values():
            node.does.first_delay_s = 3600.0
        asking = asyncio.create_task(made.chat("hello", agent="alice"))
        await until(lambda: sum(len(node.requests) for node in made.nodes.values()) == 1)
        for node in made.nodes.values():
            node.does.first_delay_s, node.does.delay_s = 0.0, 3600.0
        streaming = asyncio.create_task(made.chat("one two three", agent="bob", stream=True))
        await until(lambda: sum(node.running for node in made.nodes.values()) > 0)
        made.server.should_exit = True
        answer = await asking
        with pytest.raises(httpx2.TransportError):
            await streaming

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "stopping"
    assert int(answer.headers["retry-after"]) >= 1
    assert [record for record in caplog.records if record.exc_info] == []
