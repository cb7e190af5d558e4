"""POST /v1/agents/{id}/pin, and isolation of agents between tenants."""

import pytest

from fabric.settings import RouterSettings
from tests.router.rig import KEY, OTHER_KEY, rig

pytestmark = pytest.mark.anyio


async def test_pin_and_unpin():
    async with rig() as fabric:
        node = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        http = fabric.http()
        pinned = await http.post("/v1/agents/alice/pin", json={"pinned": True})
        shown = (await http.get("/v1/agents/alice")).json()
        unpinned = await http.post("/v1/agents/alice/pin", json={"pinned": False})
        after = (await http.get("/v1/agents")).json()["data"][0]

    answer = {"id": "alice", "object": "agent.pin", "node": node}
    assert pinned.json() == {**answer, "pinned": True, "pin_held": True}
    assert (shown["pinned"], shown["pin_held"]) == (True, True)
    assert unpinned.json() == {**answer, "pinned": False, "pin_held": False}
    assert (after["pinned"], after["pin_held"]) == (False, False)


@pytest.mark.parametrize(
    ("agent", "body", "status", "word"),
    [
        ("alice", {}, 400, "pinned"),
        ("alice", {"pinned": None}, 400, "pinned"),
        ("alice", {"pinned": "yes"}, 400, "boolean"),
        ("alice", [], 400, "object"),
        ("bob", {"pinned": True}, 404, "bob"),
        ("a%20b", {"pinned": True}, 400, "agent id"),
    ],
)
async def test_invalid_pin_request_is_refused(agent, body, status, word):
    async with rig("a") as fabric:
        await fabric.chat("hello", agent="alice")
        refused = await fabric.http().post(f"/v1/agents/{agent}/pin", json=body)

    assert refused.status_code == status
    assert word in refused.json()["error"]["message"]


async def test_no_route_reaches_another_tenants_agent():
    settings = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY})
    async with rig("ab", settings=settings) as fabric:
        mine, other = fabric.http(KEY), fabric.http(OTHER_KEY)
        await fabric.chat("the same words", agent="alice", http=mine)
        responses = [
            await other.get("/v1/agents/alice"),
            await other.post("/v1/agents/alice/pin", json={"pinned": True}),
            await other.post("/v1/agents/alice/migrate", json={"to": "node-b"}),
            await other.delete("/v1/agents/alice"),
        ]
        listed = (await other.get("/v1/agents")).json()["data"]
        metrics = (await other.get("/metrics")).text
        nodes = (await other.get("/v1/nodes")).text
        warm = await fabric.chat("the same words", agent="alice", http=other)
        kept = (await mine.get("/v1/agents/alice")).json()

    assert [answer.status_code for answer in responses] == [404] * 4
    assert listed == []
    assert warm.headers["x-macfabric-cached-tokens"] == "0"
    assert (kept["pinned"], kept["tokens"]) == (False, len("<user>the same words"))
    assert not any(word in metrics + nodes for word in ("alice", '"one"', '"two"'))
