"""An idle stream sends keep-alives."""

import asyncio

import pytest

import router.http.sse
from fabric.turn.generation import Delta, Finished, FinishReason, Prefilling
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


COMPUTED = (Prefilling(3), Prefilling(5), *SAID)


@pytest.mark.parametrize(("path", "idle"), PATHS.items())
async def test_a_silence_tells_how_much_of_the_prompt_is_computed(monkeypatch, path, idle):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as made:
        made["node-a"].does.events = COMPUTED
        made["node-a"].does.delay_s = 0.3
        async with made.http().stream("POST", path, json=BODY) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])

    total = 2 if path == "/v1/completions" else 8
    rest = b"" if idle.startswith(b":") else idle.removeprefix(b"\n")
    for done in (3, 5):
        assert f": prefill {done}/{total}\n".encode() + (rest or b"\n") in raw
    said = raw.split(b"late")[1]
    assert b"prefill" not in said


async def test_both_sdks_read_past_what_is_told_of_the_prompt(monkeypatch):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.02)
    async with rig("a") as made:
        made["node-a"].does.events = COMPUTED
        made["node-a"].does.delay_s = 0.2
        messages = BODY["messages"]
        for count in (1, 2):
            stream = await made.openai().chat.completions.create(
                model=MODEL, messages=messages, stream=True, n=count
            )
            chunks = [chunk async for chunk in stream]
            said = [c.delta.content for chunk in chunks for c in chunk.choices if c.delta.content]
            assert said == ["late"] * count
        asked = {"model": MODEL, "max_tokens": 9, "messages": messages}
        async with made.anthropic().messages.stream(**asked) as stream:
            assert await stream.get_final_text() == "late"
