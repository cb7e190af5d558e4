"""A stream in which nothing is said for long says that it lives."""

import asyncio

import pytest

import router.http.sse
from fabric.turn.generation import Delta, Finished, FinishReason
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
SAID = (Delta(0, "late"), Finished(FinishReason.STOP, 1))
PATHS = {
    "/v1/chat/completions": b": keep-alive\n\n",
    "/v1/completions": b": keep-alive\n\n",
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
}
BODY = {
    "model": MODEL,
    "max_tokens": 9,
    "stream": True,
    "prompt": "hi",
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.mark.parametrize(("path", "idle"), PATHS.items())
async def test_a_silence_is_broken_and_the_answer_follows(monkeypatch, path, idle):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as made:
        node = made["node-a"]
        node.does.events = SAID
        node.does.delay_s = 0.3  # behind its admission
        async with made.http().stream("POST", path, json=BODY) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])

    assert raw.count(idle) > 2
    rest = raw.replace(idle, b"")
    assert b"late" in rest
    assert rest.endswith((b"[DONE]\n\n", b'{"type":"message_stop"}\n\n'))


async def test_nothing_is_said_behind_the_end(monkeypatch):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.0)
    async with rig("a") as made:
        made["node-a"].does.events = SAID
        for _ in range(20):
            answer = await made.http().post("/v1/chat/completions", json=BODY)
            assert answer.text.endswith("[DONE]\n\n")
        await asyncio.sleep(0.02)
