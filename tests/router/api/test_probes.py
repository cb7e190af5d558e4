"""Requests by which clients identify a server get an answer or a clear 404."""

import asyncio

import pytest

from fabric.settings import RouterSettings
from tests.router.fake_node import MODEL
from tests.router.rig import rig

HERE = [
    ("HEAD", "/"),
    ("HEAD", "/v1/models"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("HEAD", f"/v1/models/{MODEL}"),
    ("GET", "/v1/models/org%2Fname-4bit"),
    ("GET", "/v1/models/org/name-4bit"),
    ("GET", "/health"),
    ("HEAD", "/healthz"),
    ("HEAD", "/v1/events"),
]
# Of OpenAI's other routes, and of llama.cpp, LM Studio, vLLM, SGLang and browsers.
ABSENT = [
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/moderations"),
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/images/generations"),
    ("GET", "/v1/files"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/fine_tuning/jobs"),
    ("POST", "/v1/assistants"),
    ("POST", "/v1/threads"),
    ("GET", "/v1/engines"),
    ("GET", "/v1/chat/completions/chatcmpl-1"),
    ("GET", "/v1/models/"),
    ("GET", "/v1/models/gpt-4o"),
    ("POST", "/v1/complete"),
    ("POST", "/v1/chat/completions/"),
    ("GET", "/"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/completion"),
    ("POST", "/infill"),
    ("GET", "/get_model_info"),
    ("GET", "/ping"),
    ("GET", "/docs"),
    ("GET", "/favicon.ico"),
]
OLLAMA = [
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("POST", "/api/show"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("GET", "/api/v0/models"),
]
WITHOUT_V1 = [("POST", "/chat/completions"), ("GET", "/models"), ("POST", "/messages")]


@pytest.fixture
async def http():
    settings = RouterSettings(model_aliases={"org/name-4bit": MODEL}, takeover_after_s=20.0)
    async with rig("a", settings=settings) as fabric:
        yield fabric.http(operates=False)


@pytest.mark.anyio
async def test_known_paths_answer_200(http):
    for method, path in HERE:
        async with asyncio.timeout(30):
            answer = await http.request(method, path)
        assert answer.status_code == 200, (method, path)
        assert (method == "HEAD") == (not answer.content), (method, path)


@pytest.mark.anyio
async def test_absent_paths_get_404_in_openai_or_anthropic_shape(http):
    for method, path in ABSENT:
        body = {"json": {"model": MODEL}} if method == "POST" else {}
        answer = await http.request(method, path, **body)
        anthropic_answer = await http.request(
            method, path, headers={"anthropic-version": "1"}, **body
        )
        expected = 405 if path == "/" else 404
        assert (answer.status_code, anthropic_answer.status_code) == (expected, expected), (
            method,
            path,
        )
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error", path
        assert error["message"], path
        if not path.startswith("/v1/chat/completions"):  # which is OpenAI's for every client
            assert anthropic_answer.json()["type"] == "error"
            assert anthropic_answer.json()["error"]["type"] in (
                "not_found_error",
                "invalid_request_error",
            )


@pytest.mark.anyio
async def test_ollama_paths_get_404_in_ollama_shape(http):
    for method, path in OLLAMA:
        answer = await http.request(method, path)
        assert answer.status_code == 404
        assert "below /v1" in answer.json()["error"], "clients expect a string"


@pytest.mark.anyio
async def test_base_url_without_v1_gets_hint(http):
    for method, path in WITHOUT_V1:
        answer = await http.request(method, path)
        assert answer.status_code == 404
        assert f"it is /v1{path} here" in answer.json()["error"]["message"]
