"""A prompt that fits no node's context is refused by the length of its text, as it arrives."""

import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from random import randbytes

import pytest

from fabric.limits import BODY_BYTES_MAX, MIB
from fabric.settings import RouterSettings
from fabric.turn.generation import Finished, FinishReason
from router.limits import CALL_BODY_BYTES_MAX, PROMPT_FRAME_BYTES
from tests.router.fake_node import MODEL
from tests.router.http.test_body_limit import error_of, open_body
from tests.router.rig import KEY, rig

pytestmark = pytest.mark.anyio
TEXT_BYTES = 100_000
SILENT = (Finished(FinishReason.STOP, 0),)
SETTINGS = RouterSettings(api_keys={"one": KEY}, takeover_after_s=0.3)
ESCAPES = ["\\u0061", "\\u00e9", "\\ud83e\\udd80", "\\n", "\\\\", "\\\\\\u0075"]
FRAME = {"max_tokens": 1, "metadata": {"x": "y" * (PROMPT_FRAME_BYTES - 4096)}}


async def set_prompt_limits(fabric, *nodes_bytes):
    """Set the prompt limits that the nodes report."""
    for node, size_bytes in zip(fabric.nodes.values(), nodes_bytes, strict=True):
        node.view_changes["prompt_bytes_max"] = size_bytes
        node.behaviour.events = SILENT
    await fabric.fleet.membership.refresh()


def is_too_long(answer):
    if answer.status_code == 200:
        return False
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    return True


async def post(fabric, text, path="/v1/chat/completions", **more):
    """Send a prompt that is JSON text already, beside other fields of the maximum size."""
    prompt = '"messages":[{"role":"user","content":"%s"}]' if "chat" in path else '"prompt":"%s"'
    rest = json.dumps({"model": MODEL, **FRAME})[1:]
    body = ("{" + prompt % text + "," + rest).encode()
    return await fabric.http(KEY).post(path, content=body, **more)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_is_rejected_only_if_it_cannot_fit(path):
    async with rig("a", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        assert not is_too_long(await post(fabric, "x" * TEXT_BYTES, path))
        turns_count = len(fabric["node-a"].requests)
        assert is_too_long(await post(fabric, "x" * (TEXT_BYTES + 8192), path))
        assert len(fabric["node-a"].requests) == turns_count


@pytest.mark.parametrize("spelled", ESCAPES)
async def test_json_escapes_do_not_count_as_text(spelled):
    """With any escapes, the longest prompt that fits is accepted."""
    text_bytes = len(json.loads(f'"{spelled}"').encode())
    async with rig("a", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        assert not is_too_long(await post(fabric, spelled * (TEXT_BYTES // text_bytes)))


async def test_prompt_is_rejected_at_first_byte_over_every_context():
    async with rig("a", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        begun = b'{"x": "' + b"y" * (TEXT_BYTES + PROMPT_FRAME_BYTES)
        reader, _ = await open_body(fabric, KEY, BODY_BYTES_MAX, begun)
        status, error = await error_of(reader)

    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_body_over_limit_is_rejected_by_declared_length():
    async with rig("a", settings=SETTINGS) as fabric:
        reader, _ = await open_body(fabric, KEY, BODY_BYTES_MAX + 1, b"{")
        status, error = await error_of(reader)

    assert (status, error["code"]) == (413, "too_large")


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode, encodebytes])
async def test_images_do_not_count_as_prompt_text(encode):
    pixels = encode(randbytes(8 * MIB)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixels}"}}
    async with rig("a", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        for beside, is_refused in (("x" * TEXT_BYTES, False), ("x" * 2 * MIB, True)):
            content = [{"type": "text", "text": beside}, image]
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
            answer = await fabric.http(KEY).post("/v1/chat/completions", json=body)
            assert is_too_long(answer) is is_refused


async def test_chunked_body_is_rejected_while_streaming():
    async def parts():
        for _ in range(32):
            yield b'{"x":"' + b"y" * MIB

    async with rig("a", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        answer = await fabric.http(KEY).post("/v1/chat/completions", content=parts())

    assert is_too_long(answer)


async def test_largest_context_counts_including_lost_nodes():
    async with rig("ab", settings=SETTINGS) as fabric:
        await set_prompt_limits(fabric, 1000, TEXT_BYTES)
        fabric.listed.pop("node-b")
        await fabric["node-b"].stop()
        assert not is_too_long(await post(fabric, "x" * TEXT_BYTES))
        assert is_too_long(await post(fabric, "x" * (TEXT_BYTES + 8192)))


async def test_any_body_is_read_while_a_node_is_unknown():
    settings = RouterSettings(api_keys={"one": KEY}, takeover_after_s=0.3, nodes_expected=2)
    async with rig("a", settings=settings) as fabric:
        await set_prompt_limits(fabric, TEXT_BYTES)
        assert fabric.fleet.prompt_bytes_max() == BODY_BYTES_MAX
        assert not is_too_long(await post(fabric, "x" * (4 * TEXT_BYTES)))


async def test_bodies_without_prompt_have_small_limit():
    async with rig("a", settings=SETTINGS) as fabric:
        for path in ("/v1/agents/a/fork", "/v1/agents/a/migrate"):
            body = b'{"as":"' + b"x" * CALL_BODY_BYTES_MAX + b'"}'
            answer = await fabric.http(KEY).post(path, content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
