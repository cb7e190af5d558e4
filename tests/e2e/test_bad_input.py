"""Bad input is reported as the client's error, in the API's shape; agents stay intact."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fabric.limits import BODY_BYTES_MAX
from tests.support.local_fabric import LocalFabric, local_fabric

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "The vault code of Mira is"}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    """Run one node with a short context and one agent that all bad input must leave intact."""
    folder: Path = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "only", context_tokens_max=900) as instance:
        instance.chat(
            [{"role": "user", "content": "The vault code of Mira is otter quartz."}], "keeper"
        )
        yield instance


def body(**changes: Any) -> dict[str, Any]:
    """Return a valid body with some fields replaced."""
    return {"model": "recall", "messages": [USER], **changes}


CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("malformed JSON", {"content": b'{"model": "recall", "messages": ['}, 400, "JSON"),
    ("not an object", {"content": b"[]"}, 400, ""),
    ("NaN", {"content": b'{"model": "recall", "temperature": NaN}'}, 400, "NaN"),
    ("deep nesting", {"content": b"[" * 5_000 + b"]" * 5_000}, 400, ""),
    ("unknown model", {"json": body(model="gpt-7")}, 404, "recall"),
    ("no model", {"json": {"messages": [USER]}}, 400, "model"),
    ("empty messages", {"json": body(messages=[])}, 400, "messages"),
    ("messages is text", {"json": body(messages="hello")}, 400, "messages"),
    ("unknown role", {"json": body(messages=[{"role": "wizard", "content": "x"}])}, 400, "role"),
    (
        "half a surrogate pair",
        {"json": body(messages=[{"role": "user", "content": "\ud800"}])},
        400,
        "",
    ),
    ("negative max_tokens", {"json": body(max_tokens=-2)}, 400, "max_tokens"),
    ("temperature text", {"json": body(temperature="hot")}, 400, "temperature"),
    ("too many choices", {"json": body(n=33)}, 400, "n"),
    (
        "a part without a type",
        {
            "json": body(
                messages=[{"role": "user", "content": [{"image_url": {"url": "http://x"}}]}]
            )
        },
        400,
        "type",
    ),
    (
        "prompt over the context",
        {"json": body(messages=[{"role": "user", "content": "wild geese " * 900}])},
        400,
        "900",
    ),
    (
        "a biased token that is none",
        {"json": body(logit_bias={"4000000000": 1})},
        400,
        "logit_bias",
    ),
    ("a biased token below all", {"json": body(logit_bias={"-1": 1})}, 400, "logit_bias"),
    (
        "a biased token that is none, streaming",
        {"json": body(logit_bias={"4000000000": 1}, stream=True)},
        400,
        "logit_bias",
    ),
    ("a bias that is too strong", {"json": body(logit_bias={"1": 101})}, 400, "logit_bias"),
    ("bad agent id", {"json": body(), "headers": {"x-agent-id": "../../etc"}}, 400, "agent"),
    ("oversize body", {"content": b" " * (BODY_BYTES_MAX + 1)}, 413, ""),
]


@pytest.mark.parametrize(
    ("request_", "status", "word"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_invalid_request_gets_4xx_with_message(
    fabric: LocalFabric, request_: dict[str, Any], status: int, word: str
) -> None:
    """The answer is a 4xx in OpenAI's error shape that names what is wrong."""
    if "json" in request_:
        import json

        request_ = {**request_, "content": json.dumps(request_["json"]).encode()}
        del request_["json"]
    headers = {"content-type": "application/json", **request_.pop("headers", {})}

    response = fabric.http.post(CHAT, **request_, headers=headers)

    assert status == response.status_code, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert word.lower() in (error["message"] + str(error["param"])).lower()
    assert "wild geese" not in response.text


def test_logit_bias_accepts_last_token_id_and_rejects_the_next(
    fabric: LocalFabric,
) -> None:
    """The official SDK receives an answer for the one, and a BadRequestError for the other."""
    count = fabric.services["only"].node.resources.identity.model.vocabulary_size
    assert fabric.chat([USER], "biased", logit_bias={str(count - 1): -1}, max_tokens=1)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            fabric.chat([USER], "biased", logit_bias={str(count): -1}, stream=stream)
        assert caught.value.code == "invalid_request_error"
        assert caught.value.param == "logit_bias"
        assert str(count - 1) in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "word"),
    [
        ("GET", "/v1/agents/nobody", None, 404, "nobody"),
        ("DELETE", "/v1/agents/nobody", None, 404, ""),
        ("POST", "/v1/agents/nobody/migrate", b'{"to": "only"}', 404, ""),
        ("POST", "/v1/agents/keeper/migrate", b'{"to": "moon"}', 404, "only"),
        ("POST", "/v1/agents/keeper/migrate", b"{}", 400, "to"),
        ("POST", "/v1/agents/keeper/migrate", b"{", 400, ""),
        ("GET", "/v1/models/gpt-7", None, 404, ""),
        ("GET", "/v1/nothing", None, 404, ""),
        ("PUT", "/v1/chat/completions", b"{}", 405, ""),
    ],
)
def test_management_routes_use_the_same_error_shape(
    fabric: LocalFabric, method: str, path: str, content: bytes | None, status: int, word: str
) -> None:
    """Management routes use the same error shape."""
    response = fabric.http.request(method, path, content=content)

    assert status == response.status_code, response.text
    assert word in response.json()["error"]["message"]


def test_agent_is_intact_after_all_bad_input(fabric: LocalFabric) -> None:
    """After all bad input the agent still has its memory, and nothing leaked."""
    messages = [
        {"role": "user", "content": "The vault code of Mira is otter quartz."},
        {"role": "assistant", "content": "Noted."},
        USER,
    ]
    answer = fabric.chat(messages, "keeper")
    service = fabric.services["only"]

    assert answer.text == " otter quartz."
    assert answer.cache == "hot"
    assert service.node.resources.store.blocks.check_integrity() == []
    assert fabric.http.get("/healthz").json()["status"] == "ok"
    agents = [agent["id"] for agent in fabric.http.get("/v1/agents").json()["data"]]
    assert sorted(agents) == ["biased", "keeper"]
