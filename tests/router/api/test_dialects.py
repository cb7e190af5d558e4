"""A second dialect unlike the first: other errors, named events, a reported stop string.

The dialect is all that a new API has to provide; the rest of the router is real.
"""

from contextlib import aclosing
from dataclasses import dataclass

import pytest

import router.app
from fabric.limits import BODY_BYTES_MAX
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Identity,
    IdentityKind,
    Priority,
    Sampling,
)
from router.api.adapter import ApiAdapter, ApiRequest
from router.http.errors import ErrorBody
from router.http.schema import Flag, ObjectOf, Text, optional, required
from router.http.sse import COMMENT, frame
from router.prompt import raw_prompt
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, rig, until

pytestmark = pytest.mark.anyio
PATH = "/v1/tales"
TALE = {"model": MODEL, "begin": "once upon"}
STOPPED = (Delta(0, "on"), Delta(1, "ce"), Finished(FinishReason.STOP, 2, stop_string=" upon"))


@dataclass(frozen=True, kw_only=True)
class TaleBody:
    model: str = required(Text())
    begin: str = required(Text())
    stream: bool = optional(Flag(), False)


class Tales(ApiAdapter[ApiRequest]):
    path = PATH
    idle = COMMENT
    streams_calls = False

    def parse(self, headers, raw, /):
        body = ObjectOf(TaleBody).read(raw)
        return ApiRequest(
            model=body.model,
            identity=Identity(IdentityKind.CONTENT),
            prompt=raw_prompt(body.begin),
            sampling=Sampling(),
            stream=body.stream,
            priority=Priority.BACKGROUND,
            prefetch=(),
        )

    def whole(self, request, admitted, answer):
        return {"tale": answer.text, "stopped_at": answer.finished.stop_string}

    async def frames(self, request, admitted, events):
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    yield frame({"part": event.text}, "tale_part")
                else:
                    yield frame({"stopped_at": event.stop_string}, "tale_end")

    def error(self, error):
        return ErrorBody({"alas": error.code}, "alas")


@pytest.fixture(autouse=True)
def _tales(monkeypatch):
    adapters_of = router.app.adapters_of
    monkeypatch.setattr(router.app, "adapters_of", lambda *parts: [*adapters_of(*parts), Tales()])


async def test_dialect_formats_its_own_responses():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = STOPPED
        whole = await fabric.http().post(PATH, json=TALE)
        streamed = await fabric.http().post(PATH, json={**TALE, "stream": True})
        request = node.requests[0]

    assert whole.json() == {"tale": "once", "stopped_at": " upon"}
    assert whole.headers["x-macfabric-node"] == "node-a"
    assert streamed.text == (
        'event: tale_part\ndata: {"part":"on"}\n\n'
        'event: tale_part\ndata: {"part":"ce"}\n\n'
        'event: tale_end\ndata: {"stopped_at":" upon"}\n\n'
    )
    assert (request.prompt, request.priority) == ("once upon", Priority.BACKGROUND)


async def test_dialect_formats_every_error_below_its_path():
    settings = RouterSettings(api_keys={"one": KEY}, loopback_without_key=False)
    async with rig("a", settings=settings, tended=False) as fabric:
        http = fabric.http(KEY)
        answers = [
            await fabric.http(operates=False).post(PATH, json=TALE),
            await http.get(PATH),
            await http.get(f"{PATH}/of/old"),
            await http.post(PATH, content=b" " * (BODY_BYTES_MAX + 1)),
            await http.post(PATH, content=b"{"),
            await http.post(PATH, json={}),
            await http.post(PATH, json={**TALE, "model": "gpt"}),
        ]
        other = await http.get(f"{PATH}telling")

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (401, {"alas": "invalid_api_key"}),
        (405, {"alas": "method_not_allowed"}),
        (404, {"alas": "unknown_url"}),
        (413, {"alas": "too_large"}),
        (400, {"alas": "invalid_json"}),
        (400, {"alas": "missing_required_parameter"}),
        (404, {"alas": "model_not_found"}),
    ]
    assert other.json()["error"]["code"] == "unknown_url"


async def test_mid_stream_error_is_the_last_event():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "on"),
            Failed(500, "engine_failed", "it broke"),
        ]
        streamed = await fabric.http().post(PATH, json={**TALE, "stream": True})

    assert streamed.text.split("\n\n") == [
        'event: tale_part\ndata: {"part":"on"}',
        'event: alas\ndata: {"alas":"engine_failed"}',
        "",
    ]


async def test_dialect_exception_becomes_its_own_500_and_frees_node(monkeypatch):
    def broken(*_args):
        message = "secret"
        raise KeyError(message)

    monkeypatch.setattr(Tales, "whole", broken)
    async with rig("a") as fabric:
        answer = await fabric.http().post(PATH, json=TALE)
        await until(lambda: fabric.fleet.ledger.turns("node-a") == 0)

    assert (answer.status_code, answer.json()) == (500, {"alas": "internal_error"})
