import asyncio
import json
import logging

import openai
import pytest
from starlette.requests import Request
from starlette.routing import Route

from fabric.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
    OverloadedError,
    RejectedError,
    RetryElsewhereError,
    RetryLaterError,
    TooLargeError,
)
from fabric.limits import BODY_BYTES_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]

NODE_ERRORS = [
    (RejectedError("no", code="context_length_exceeded", param="messages"), openai.BadRequestError),
    (NotFoundError("no"), openai.NotFoundError),
    (ConflictError("no"), openai.ConflictError),
    (TooLargeError("no"), openai.APIStatusError),
    (OverloadedError("no", retry_after_s=7.2), openai.RateLimitError),
    (RetryLaterError("no", retry_after_s=3.0), openai.InternalServerError),
    (CorruptDataError("no"), openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "kind"), NODE_ERRORS, ids=lambda x: getattr(x, "code", ""))
@pytest.mark.parametrize("stream", [False, True])
async def test_node_error_reaches_client_unchanged(error, kind, stream):
    async with rig("a", tended=False) as fabric:
        fabric["node-a"].behaviour.refuse = error
        with pytest.raises(kind) as caught:
            await fabric.openai().chat.completions.create(model=MODEL, messages=USER, stream=stream)

    assert caught.value.status_code == error.status
    assert caught.value.code == error.code
    assert caught.value.param == error.param
    assert caught.value.request_id.startswith("req_")
    wait_s = getattr(error, "retry_after_s", None)
    expected = None if wait_s is None else {7.2: "8", 3.0: "3"}[wait_s]
    assert caught.value.response.headers.get("retry-after") == expected


async def test_disputed_owner_is_503():
    async with rig("a", tended=False) as fabric:
        fabric["node-a"].behaviour.refuse = RetryElsewhereError("not mine")
        answer = await fabric.chat("hi", agent="alice")
        requests = len(fabric["node-a"].requests)

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["retry-after"] == "1"
    assert requests == 2, "retried once, after a refresh of all nodes"


@pytest.mark.parametrize(
    "raw",
    [
        (401, b'{"error": {"code": "invalid_api_key", "message": "x", "status": 401}}'),
        (500, b"<html>"),
        (500, b'{"error": 3}'),
        (500, b'{"error": {"code": "x"}}'),
        (200, b"not json\n"),
        (200, b'{"event": "delta", "index": 0, "text": "x"}\n'),
        (200, b'{"event": "unknown"}\n'),
    ],
)
async def test_malformed_node_response_is_500(raw):
    async with rig("a", tended=False) as fabric:
        fabric["node-a"].behaviour.raw_answer = raw
        answer = await fabric.chat("hi")

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


async def test_unknown_model_error_lists_known_models():
    async with rig("a") as fabric:
        with pytest.raises(openai.NotFoundError) as caught:
            await fabric.openai().chat.completions.create(model="gpt-4", messages=USER)

    assert caught.value.code == "model_not_found"
    assert MODEL in caught.value.message


async def test_unknown_route_is_404_and_wrong_method_is_405():
    async with rig("a", tended=False) as fabric:
        http = fabric.http()
        missing = await http.get("/v1/nothing")
        slash = await http.post("/v1/chat/completions/", json={})
        method = await http.get("/v1/chat/completions")

    assert missing.status_code == slash.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_url"
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"
    assert method.json()["error"]["code"] == "method_not_allowed"


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"model": "a", "model": "b"}',
    b"[" * 100_000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
    b'{"model": "echo", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"model": "echo", "temperature": 1e999, "messages": [{"role":"user","content":"x"}]}',
    b'{"n": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_malformed_bodies_are_400(body):
    async with rig("a", tended=False) as fabric:
        http = fabric.http()
        answers = [
            await http.post(path, content=body)
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/agents/x/migrate")
        ]

    for answer in answers:
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_body_over_limit_is_413_declared_or_chunked():
    async def drip():
        for _ in range(BODY_BYTES_MAX // (1 << 20) + 1):
            yield b" " * (1 << 20)

    async with rig("a", tended=False) as fabric:
        http = fabric.http()
        declared = await http.post("/v1/completions", content=b" " * (BODY_BYTES_MAX + 1))
        chunked = await http.post("/v1/completions", content=drip())
        fine = await fabric.chat("x" * 1_000_000)

    assert declared.status_code == chunked.status_code == 413
    assert chunked.json()["error"]["code"] == "too_large"
    assert fine.status_code == 200


async def test_unknown_exception_is_500_without_details(caplog):
    async def explode(_request: Request):
        message = "secret prompt text"
        raise KeyError(message)

    async with rig("a", tended=False) as fabric:
        fabric.app.router.routes.append(Route("/v1/explode", explode))
        with caplog.at_level(logging.DEBUG):
            answer = await fabric.http().get("/v1/explode")

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" not in caplog.text
    assert "KeyError" in caplog.text


async def test_log_contains_no_prompt_text(caplog):
    with caplog.at_level(logging.DEBUG):
        async with rig("ab", settings=None) as fabric:
            await fabric.chat("sesame", agent="alice")
            await fabric.chat("sesame", stream=True)
            await fabric.http().post("/v1/chat/completions", content=b'{"sesame"')
            fabric["node-a"].behaviour.break_after = fabric["node-b"].behaviour.break_after = 2
            await fabric.chat("sesame", agent="alice")

    ours = [record for record in caplog.records if record.name.startswith("macfabric")]
    assert ours, "something was logged"
    assert not any("sesame" in record.getMessage() for record in ours)


async def test_aborted_upload_does_no_harm():
    async with rig("a", tended=False) as fabric:
        _, writer = await asyncio.open_connection("127.0.0.1", int(fabric.url.split(":")[2]))
        fabric.writers.append(writer)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        assert (await fabric.chat("hi")).status_code == 200
