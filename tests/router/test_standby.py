"""Two routers of one fabric: one is active, the other forwards to it and takes over."""

import asyncio
import time
from unittest import mock

import aiohttp
import pytest

from fabric.errors import FatalError, RetryLaterError
from fabric.keys import OPERATOR_HEADER
from fabric.settings import RouterSettings
from router import serve as serving_module
from router.fleet.term_keeper import TermKeeper
from router.http import standby_gate
from router.http.forwarded import CALLER_HEADER, PROOF_HEADER
from tests.router.fake_node import MODEL
from tests.router.pair import AUTH, pair
from tests.router.rig import OPERATOR_KEY, rig, until

pytestmark = pytest.mark.anyio


def chat(text="hello", **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def post_chat(router, *, headers=AUTH, **more):
    return await router.http.post("/v1/chat/completions", json=chat(**more), headers=headers)


async def test_standby_forwards_requests_to_the_active_router():
    async with pair() as (fabric, one, two):
        answer = await post_chat(two)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-macfabric-node"] in fabric.nodes
        async with two.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True), headers=AUTH
        ) as stream:
            lines = [line async for line in stream.aiter_lines()]
        assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines
        missing = await two.http.get("/v1/agents/nobody?x=%2F", headers=AUTH)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_agent")
        roles = [(await each.http.get("/v1/router", headers=AUTH)).json() for each in (one, two)]
        assert [row["role"] for row in roles] == ["active", "standby"]
        assert {row["active_url"] for row in roles} == {one.url}
        terms = {term for node in fabric.nodes.values() for term in node.terms}
        assert terms == {one.keeper.held()}, "no call of the standby changed a node"


@pytest.mark.parametrize("waits_s", [0.3, 3600.0])
async def test_request_waits_a_moment_for_an_active_router(monkeypatch, waits_s):
    """A router that has just started does not know yet which one is active."""
    monkeypatch.setattr(standby_gate, "ACTIVE_WAIT_S", 1.0)
    active_s, served = time.monotonic() + waits_s, []

    async def app(scope, receive, send):
        served.append(scope["path"])

    relay = mock.Mock(is_active=lambda: time.monotonic() >= active_s, active_url=lambda: "")
    gate = standby_gate.StandbyGate(app, relay)
    scope = {"type": "http", "path": "/v1/models", "headers": []}
    if waits_s > 1.0:
        with pytest.raises(RetryLaterError, match="no router of this fabric is active"):
            await gate(scope, asyncio.Event().wait, None)
    else:
        await gate(scope, None, None)

    assert served == (["/v1/models"] if waits_s < 1.0 else [])


async def test_standby_refuses_unknown_keys():
    async with pair(loopback_without_key=False) as (_, one, two):
        for headers in ({}, {"authorization": "Bearer a-key-that-nobody-has"}):
            assert (await post_chat(two, headers=headers)).status_code == 401
        forged = {CALLER_HEADER: "WyJvbmUiLCBudWxsXQ==", PROOF_HEADER: "0" * 64}
        for router in (one, two):
            assert (await post_chat(router, headers=forged)).status_code == 401
        nodes = await two.http.get("/v1/nodes", headers={OPERATOR_HEADER: OPERATOR_KEY})
        assert nodes.status_code == 200
        assert all("incarnation" in row for row in nodes.json()["data"]), "the operator's view"


async def test_standby_does_not_bypass_the_receipt_of_a_running_erasure():
    """The standby learns the tombstone from the first node that erased the agent."""
    async with pair("ab") as (fabric, one, _):
        headers = {**AUTH, "x-agent-id": "anna"}
        answer = await post_chat(one, headers=headers)
        owner = fabric.nodes[answer.headers["x-macfabric-node"]]
        (other,) = (node for node in fabric.nodes.values() if node is not owner)
        owner.behaviour.slow["erase_agent"] = 3.0
        deleting = asyncio.create_task(one.http.delete("/v1/agents/anna", headers=AUTH))
        reads_count = other.calls["share_erasures"]
        await until(lambda: other.calls["share_erasures"] > reads_count)
        await asyncio.sleep(1.5)  # a heartbeat of the standby, which knows the tombstone now
        assert ("one", "anna") in owner.memory
        receipt = (await deleting).json()
        assert receipt["deleted"]
        assert receipt["bytes_removed"] > 0
        assert ("one", "anna") not in owner.memory


async def test_stopped_router_hands_over_at_once():
    async with pair() as (_fabric, one, two):
        before = one.keeper.held()
        named = await post_chat(one, headers={**AUTH, "x-agent-id": "anna"})
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        await until(lambda: two.keeper.is_active)
        assert two.keeper.held() > before
        after = await post_chat(two, headers={**AUTH, "x-agent-id": "anna"})
        assert after.headers["x-macfabric-node"] == named.headers["x-macfabric-node"]
        assert int(after.headers["x-macfabric-epoch"]) >= int(named.headers["x-macfabric-epoch"])


async def test_router_without_renewal_stops_forwards_and_is_fenced():
    async with pair() as (fabric, one, two):
        await post_chat(one)
        old_term = one.keeper.held()

        async def hang():
            await asyncio.sleep(3600)

        with mock.patch.object(one.keeper, "_step", hang):
            await until(lambda: two.keeper.is_active and one.keeper.active_url == two.url)
            assert not one.keeper.is_active
            assert (await post_chat(one)).status_code == 200, "forwarded to the other router"
            with (
                mock.patch.object(one.keeper, "current", return_value=old_term),
                mock.patch.object(TermKeeper, "is_active", property(lambda _: True)),
            ):
                refused = await post_chat(one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "old_router")
        assert "retry-after" in refused.headers
        lasts = [node.terms[-1] for node in fabric.nodes.values() if node.terms]
        assert lasts, "a node served"
        assert max(lasts) == two.keeper.held()


async def test_client_gets_retry_after_without_an_active_router():
    async with pair() as (fabric, one, two):
        for node in fabric.nodes.values():
            node.behaviour.fail["grant_term"] = RetryLaterError("cut off")
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        refused = await post_chat(two)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "no_active_router"
        assert (await two.http.get("/healthz")).status_code == 200


async def test_two_voters_warn_and_promotion_by_hand_works():
    async with pair("ab") as (fabric, one, two):
        shown = (await two.http.get("/v1/router", headers=AUTH)).json()
        assert "macfabric voter" in shown["problem"]
        await fabric.nodes["node-a"].stop()
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        operator = {OPERATOR_HEADER: OPERATOR_KEY}
        assert (await two.http.post("/v1/router/promote", headers=AUTH)).status_code == 403
        promoted = await two.http.post("/v1/router/promote", headers=operator)
        assert (promoted.status_code, promoted.json()["promoted"]) == (200, True)
        assert (await post_chat(two)).status_code == 200
        metrics = (await two.http.get("/metrics", headers=operator)).text
        assert "macfabric_router_active 1.0" in metrics


async def test_a_sole_router_cannot_be_promoted():
    async with rig("a") as fabric:
        refused = await fabric.http().post("/v1/router/promote")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_standby")
        assert (await fabric.http().get("/v1/router")).json()["role"] == "sole"


def test_the_number_of_voters_must_be_known():
    with pytest.raises(FatalError, match="nodes_expected"):
        serving_module._term_keeper(RouterSettings(standby=True), None, 0.0)


async def test_request_to_a_frozen_router_is_answered_when_another_takes_over():
    async with pair() as (_, one, two):
        assert (await post_chat(two)).status_code == 200

        async def hang(*_, **__):
            await asyncio.sleep(3600)

        with (
            mock.patch.object(one.keeper, "_step", hang),
            mock.patch.object(aiohttp.ClientSession, "request", hang),
        ):
            refused = await post_chat(two)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert two.keeper.is_active
        assert (await post_chat(two)).status_code == 200
