"""Retention of a run's events."""

import asyncio
import json

import pytest

from router.runs.run_log import RunLog

pytestmark = pytest.mark.anyio


async def frames_of(log, after=None, count=None):
    found = []
    async for raw in log.frames(after):
        found += [part for part in raw.decode().split("\n\n") if part and part[0] != ":"]
        if count is not None and len(found) >= count:
            break
    return [dict(line.split(": ", 1) for line in part.splitlines()) for part in found]


async def test_dropped_events_are_reported_as_missed(monkeypatch):
    monkeypatch.setattr("router.runs.run_log.SCENARIO_EVENTS_MAX", 3)
    log = RunLog()
    for number in range(5):
        log.append("waited", {"number": number})
    log.close()
    missed, *rest = await frames_of(log)
    assert (missed["event"], json.loads(missed["data"])) == ("missed", {"count": 2})
    assert [json.loads(part["data"])["number"] for part in rest] == [2, 3, 4]
    monkeypatch.setattr("router.runs.run_log.SCENARIO_EVENTS_BYTES_MAX", 1)
    log.append("waited", {})
    assert [part["event"] for part in await frames_of(log)] == ["missed"]


async def test_slow_follower_is_cut_and_can_resume(monkeypatch):
    monkeypatch.setattr("router.runs.run_log.SCENARIO_LAG_EVENTS_MAX", 4)
    log = RunLog()
    log.append("waited", {"number": 0})
    frames = log.frames(None)
    await anext(frames)  # the first comment
    first = await anext(frames)
    for number in range(1, 7):  # while the follower reads nothing
        log.append("waited", {"number": number})
    async with asyncio.timeout(10):
        cut = (await anext(frames)).decode()
    with pytest.raises(StopAsyncIteration):
        await anext(frames)
    assert cut.startswith("event: cut")
    last = json.loads(cut.partition("data: ")[2])["last"]
    assert f"id: {last}\n".encode() in first
    log.close()
    assert [json.loads(p["data"])["number"] for p in await frames_of(log, last)] == [*range(1, 7)]
