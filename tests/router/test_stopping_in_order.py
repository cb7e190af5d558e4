"""A router that stops in order: running turns finish within a limit, new ones are refused."""

import asyncio
import json

import pytest

from router.stop import RouterStop
from tests.router.rig import MODEL, rig, until

pytestmark = pytest.mark.anyio
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two three four"}]}
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "one two three four"},
    "/v1/responses": {"model": MODEL, "input": "one two three four"},
    "/v1/messages": CHAT | {"max_tokens": 64},
}


def stop_of(fabric, wait_s, reports=None):
    reports = [] if reports is None else reports
    turns = fabric.services.turns.running
    return RouterStop(
        fabric.server, turns, lambda: wait_s, report=lambda *turns_left: reports.append(turns_left)
    )


def set_delay(fabric, delay_s):
    for node in fabric.nodes.values():
        node.behaviour.delay_s = delay_s


async def wait_until_running(fabric):
    await until(lambda: sum(node.running for node in fabric.nodes.values()) > 0)


async def test_stopping_router_finishes_running_turns_and_refuses_new_ones():
    async with rig("a") as fabric:
        set_delay(fabric, 0.3)
        reports = []
        asking = asyncio.create_task(fabric.chat("one two three four", agent="bob"))
        await wait_until_running(fabric)
        stop = stop_of(fabric, 60.0, reports)
        stop.on_signal()
        await asyncio.sleep(0)
        refused = await fabric.chat("hello", agent="alice")
        health = await fabric.http().get("/healthz")
        answer = await asking
        await until(lambda: fabric.server.should_exit)
        await stop.close()

    assert answer.status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "stopping"
    assert int(refused.headers["retry-after"]) >= 1
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert reports[0][0] == 1, "one turn is left"


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_outlasting_the_wait_ends_with_error_event(path):
    async with rig("a") as fabric:
        set_delay(fabric, 3600.0)
        node = fabric.nodes["node-a"]
        asking = asyncio.create_task(
            fabric.http().post(path, json=STREAMS[path] | {"stream": True})
        )
        await wait_until_running(fabric)
        stop = stop_of(fabric, 0.2)
        stop.on_signal()
        answer = await asking
        await until(lambda: node.cancelled == 1)
        await stop.close()

    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert "stopping" in lines[-1] or "the router is stopping" in lines[-1], lines
    if path == "/v1/messages":
        assert last["type"] == "error"
    else:
        assert "error" in lines[-1]


async def test_unstreamed_turn_outlasting_the_wait_is_503():
    async with rig("ab") as fabric:
        set_delay(fabric, 3600.0)
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 3600.0
        waiting_turn = asyncio.create_task(fabric.chat("hello", agent="alice"))
        await until(lambda: sum(len(node.requests) for node in fabric.nodes.values()) == 1)
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 0.0
        running_turn = asyncio.create_task(fabric.chat("one two", agent="bob"))
        await wait_until_running(fabric)
        stop = stop_of(fabric, 0.2)
        stop.on_signal()
        answers = [await waiting_turn, await running_turn]
        await stop.close()
        assert len(fabric.services.turns.running) == 0

    assert [answer.status_code for answer in answers] == [503, 503]
    assert [answer.json()["error"]["code"] for answer in answers] == ["stopping"] * 2
    assert all("retry-after" in answer.headers for answer in answers)


async def test_second_signal_ends_the_wait():
    async with rig("a") as fabric:
        set_delay(fabric, 3600.0)
        asking = asyncio.create_task(fabric.chat("one two", agent="bob"))
        await wait_until_running(fabric)
        stop = stop_of(fabric, 3600.0)
        stop.on_signal()
        await asyncio.sleep(0.1)
        assert not asking.done()
        stop.on_signal()
        answer = await asking
        await stop.close()

    assert answer.status_code == 503


async def test_disconnected_client_leaves_no_running_turn():
    async with rig("a") as fabric:
        set_delay(fabric, 3600.0)
        asking = asyncio.create_task(fabric.chat("one two", agent="bob"))
        await wait_until_running(fabric)
        assert len(fabric.services.turns.running) == 1
        asking.cancel()
        await until(lambda: len(fabric.services.turns.running) == 0)
