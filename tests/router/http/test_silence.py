"""An idle stream sends keep-alives."""

import asyncio

import pytest

import router.http.sse
from fabric.turn.generation import Delta, Finished, FinishReason, Prefilling
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
ANSWER_EVENTS = (Delta(0, "late"), Finished(FinishReason.STOP, 1))
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
async def test_idle_stream_sends_keepalives_before_answer(monkeypatch, path, idle):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = ANSWER_EVENTS
        node.behaviour.delay_s = 0.3  # behind its admission
        async with fabric.http().stream("POST", path, json=BODY) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])

    assert raw.count(idle) > 2
    rest = raw.replace(idle, b"")
    assert b"late" in rest
    assert rest.endswith((b"[DONE]\n\n", b'{"type":"message_stop"}\n\n'))


async def test_nothing_is_sent_after_end_of_stream(monkeypatch):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.0)
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = ANSWER_EVENTS
        for _ in range(20):
            answer = await fabric.http().post("/v1/chat/completions", json=BODY)
            assert answer.text.endswith("[DONE]\n\n")
        await asyncio.sleep(0.02)


COMPUTED = (Prefilling(3), Prefilling(5), *ANSWER_EVENTS)


@pytest.mark.parametrize(("path", "idle"), PATHS.items())
async def test_keepalives_report_prefill_progress(monkeypatch, path, idle):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = COMPUTED
        fabric["node-a"].behaviour.delay_s = 0.3
        async with fabric.http().stream("POST", path, json=BODY) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])

    total = 2 if path == "/v1/completions" else 8
    rest = b"" if idle.startswith(b":") else idle.removeprefix(b"\n")
    for done in (3, 5):
        assert f": prefill {done}/{total}\n".encode() + (rest or b"\n") in raw
    after_answer = raw.split(b"late")[1]
    assert b"prefill" not in after_answer


async def test_both_sdks_ignore_prefill_progress(monkeypatch):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = COMPUTED
        fabric["node-a"].behaviour.delay_s = 0.2
        messages = BODY["messages"]
        for count in (1, 2):
            stream = await fabric.openai().chat.completions.create(
                model=MODEL, messages=messages, stream=True, n=count
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.delta.content for chunk in chunks for c in chunk.choices if c.delta.content]
            assert texts == ["late"] * count
        message_request = {"model": MODEL, "max_tokens": 9, "messages": messages}
        async with fabric.anthropic().messages.stream(**message_request) as stream:
            assert await stream.get_final_text() == "late"
