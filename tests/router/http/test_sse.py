"""Frames of one text, and readers that disconnect in mid-stream."""

import asyncio
import json
import logging
import socket
import struct

import pytest

from fabric.turn.generation import Delta, Finished, FinishReason, encode_event
from router.http.sse import TextFrames, frame
from tests.router.fake_node import MODEL
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
WORDS = 400


@pytest.mark.parametrize("text", ["", "word ", 'a "quoted"\n', "\0text\0", "héllo 🙂", "\ud83d"])
def test_text_frame_equals_the_whole_frame(text):
    def whole(text):
        head = {"model": "\0text\0", "created": 7}
        return frame({**head, "choices": [{"delta": {"content": text}, "logprobs": None}]})

    assert TextFrames(whole).frame(text) == whole(text)


async def test_nothing_is_written_to_disconnected_reader(caplog):
    caplog.set_level(logging.WARNING)
    # In one burst, so that much is still unsent when the reader disconnects.
    burst = b"".join(encode_event(Delta(i, "word ")) for i in range(WORDS))
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [burst] * 40 + [Finished(FinishReason.STOP, 40 * WORDS)]
        fabric["node-a"].behaviour.delay_s = 0.02
        for _ in range(5):
            await asyncio.to_thread(read_a_little, fabric.url)
        await until(lambda: fabric["node-a"].cancelled == 5)

    complaints = [r.getMessage() for r in caplog.records if r.name == "asyncio"]
    assert complaints == []


def read_a_little(url):
    """Request a stream, read its beginning, and disconnect as a killed client does."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(raw), raw)
        )
        while b"word" not in client.recv(4096):
            pass
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
