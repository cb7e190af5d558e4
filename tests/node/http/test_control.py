"""The low-latency control route: only this cluster's router, and only this node's calls."""

from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette

from fabric.control.calls import (
    CONTROL_PATH,
    NODE_HEADER,
    CallRoute,
    ErrorReply,
    decode_reply,
    encode_call,
)
from fabric.control.node_calls import AgentView, CommitMigration, Committed, Flush, Offer, SealAgent
from fabric.errors import RetryElsewhereError
from fabric.keys import http_secret
from fabric.limits import CONTROL_BYTES_MAX, MANIFEST_BYTES_MAX
from fabric.turn.generation import CLUSTER_HEADER
from node.control_calls import ControlCalls
from node.http.routes import ControlHttp
from node.runtime.workers import Workers
from node.store.granted_terms import GrantedTerms
from tests.support.clocks import ManualClock

pytestmark = pytest.mark.anyio
KEY = b"k" * 32
HEADERS = {CLUSTER_HEADER: http_secret(KEY), NODE_HEADER: "node-a"}
SEAL = SealAgent("default", "kim", 3, "m-1", "node-b")
COMMIT = CommitMigration("m-1", "node-b", Offer(b"record", b"ticket", ()), 4)


class Answers:
    """The real call table with one answer, and the calls that it received."""

    def __init__(self):
        self.received = []
        self.calls = ControlCalls.__new__(ControlCalls)
        self.calls._terms = GrantedTerms(Path("unused"), Workers(1), ManualClock())
        self.calls._answers = dict.fromkeys((SealAgent, CommitMigration, Flush), self._refuse)

    async def _refuse(self, call):
        self.received.append(call)
        message = "asked"
        raise RetryElsewhereError(message)

    async def __call__(self, raw):
        return await self.calls.answer(raw, CallRoute.HTTP)


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
async def client(answers):
    app = Starlette(routes=ControlHttp("node-a", KEY, answers).routes())
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


@pytest.mark.parametrize("call", [SEAL, COMMIT], ids=["seal", "commit"])
async def test_low_latency_calls_are_answered(client, answers, call):
    response = await client.post(CONTROL_PATH, content=encode_call(call), headers=HEADERS)
    assert response.status_code == 200
    assert answers.received == [call]
    reply = decode_reply(Committed, response.content)
    assert (reply.code, reply.message) == (RetryElsewhereError.code, "asked")


async def test_head_request_opens_a_connection_for_the_router_only(client, answers):
    statuses = [
        (await client.head(CONTROL_PATH, headers=headers)).status_code
        for headers in (HEADERS, HEADERS | {CLUSTER_HEADER: "guess"}, HEADERS | {NODE_HEADER: "x"})
    ]
    assert statuses == [204, 401, 421]
    assert answers.received == []


@pytest.mark.parametrize("raw", [encode_call(Flush()), b"", b"\xc1", b"\x80"])
async def test_other_and_malformed_calls_get_an_error_reply(client, answers, raw):
    response = await client.post(CONTROL_PATH, content=raw, headers=HEADERS)
    assert response.status_code == 200
    reply = decode_reply(AgentView, response.content)
    assert isinstance(reply, ErrorReply)
    assert 400 <= reply.status < 500
    assert answers.received == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({CLUSTER_HEADER: "guessed", NODE_HEADER: "node-a"}, 401),
        ({CLUSTER_HEADER: http_secret(b"o" * 32), NODE_HEADER: "node-a"}, 401),
        ({CLUSTER_HEADER: http_secret(KEY)}, 421),
        ({CLUSTER_HEADER: http_secret(KEY), NODE_HEADER: "node-b"}, 421),
    ],
)
async def test_strangers_and_calls_for_other_nodes_are_refused(client, answers, headers, status):
    response = await client.post(CONTROL_PATH, content=encode_call(SEAL), headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["status"] == status
    assert answers.received == []


async def test_largest_record_is_accepted(client, answers):
    """With the ticket for all of its blocks."""
    offer = Offer(bytes(MANIFEST_BYTES_MAX), bytes(8 << 20), ())
    raw = encode_call(CommitMigration("m-1", "node-b", offer, 4))
    response = await client.post(CONTROL_PATH, content=raw, headers=HEADERS)
    assert response.status_code == 200
    assert decode_reply(Committed, response.content).message == "asked"
    assert len(answers.received[0].offer.manifest) == MANIFEST_BYTES_MAX


async def test_body_over_the_limit_is_refused(client, answers):
    async def parts():
        for _ in range(CONTROL_BYTES_MAX // (1 << 20) + 1):
            yield bytes(1 << 20)

    response = await client.post(CONTROL_PATH, content=parts(), headers=HEADERS)
    assert response.status_code == 413
    assert answers.received == []
