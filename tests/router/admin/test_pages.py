"""Pages and filters of lists: bounded, complete, and limited to a tenant."""

import pytest

from fabric.settings import RouterSettings
from router import limits
from router.admin import agents as agents_api
from tests.router.rig import KEY, OPERATOR_KEY, OTHER_KEY, rig
from tests.router.sse_reader import following

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=20.0
)


async def listed(http, path):
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_pages_list_every_agent_once():
    async with rig("ab") as fabric:
        for name in ("d", "a", "c", "b", "e"):
            await fabric.chat(f"hello {name}", agent=name)
        http, names, after = fabric.http(), [], ""
        while True:
            page = await listed(http, f"/v1/agents?limit=2{after}")
            names.append([row["id"] for row in page["data"]])
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
    assert names == [["a", "b"], ["c", "d"], ["e"]]


async def test_list_without_a_limit_is_bounded(monkeypatch):
    monkeypatch.setattr(agents_api, "AGENTS_PAGE_MAX", 3)
    async with rig("a") as fabric:
        for number in range(5):
            await fabric.chat(f"hello {number}", agent=f"agent-{number}")
        page = await listed(fabric.http(), "/v1/agents")
        over = await fabric.http().get("/v1/agents?limit=4")
    assert (len(page["data"]), page["has_more"], page["last_id"]) == (3, True, "agent-2")
    assert (over.status_code, over.json()["error"]["param"]) == (400, "limit")
    assert limits.AGENTS_PAGE_MAX >= 1000


async def test_agents_are_filtered_by_node_and_tier():
    async with rig("ab") as fabric:
        http = fabric.http()
        homes = {}
        for name in ("a", "b", "c"):
            answer = await fabric.chat(f"hello {name}", agent=name)
            homes[name] = answer.headers["x-macfabric-node"]
        fabric[homes["b"]].memory["default", "b"].hot = False
        fabric[homes["b"]].changes += 1
        on_a = await listed(http, "/v1/agents?node=node-a")
        hot = await listed(http, "/v1/agents?tier=hot")
        unknown = await http.get("/v1/agents?node=node-z")
        invalid = await http.get("/v1/agents?tier=lukewarm")
    assert [row["id"] for row in on_a["data"]] == [n for n in homes if homes[n] == "node-a"]
    assert [row["id"] for row in hot["data"]] == ["a", "c"]
    assert unknown.status_code == 404
    assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "tier")


async def test_operators_list_a_tenant_or_all_and_tenants_their_own():
    async with rig("ab", settings=TENANTS) as fabric:
        one, two = (fabric.http(key, operates=False) for key in (KEY, OTHER_KEY))
        await fabric.chat("hello", agent="mira", http=one)
        await fabric.chat("hello there", agent="secret", http=two)
        ops = fabric.http(OPERATOR_KEY, operates=False)
        whole = await listed(ops, "/v1/agents?tenant=*&limit=1")
        rest = await listed(ops, f"/v1/agents?tenant=*&after={whole['last_id']}")
        of_two = await listed(ops, "/v1/agents?tenant=two")
        shown = await ops.get("/v1/agents/secret?tenant=two")
        refused = [
            await one.get(path)
            for path in ("/v1/agents?tenant=*", "/v1/agents?tenant=two",
                         "/v1/agents/secret?tenant=two", "/v1/events?tenant=two")
        ]  # fmt: skip
        own = await listed(one, "/v1/agents")
        erased = await ops.delete("/v1/agents/secret?tenant=two")

    names = [(row["tenant"], row["id"]) for row in (*whole["data"], *rest["data"])]
    assert names == [("one", "mira"), ("two", "secret")]
    assert (whole["has_more"], rest["has_more"]) == (True, False)
    assert [row["id"] for row in of_two["data"]] == ["secret"]
    assert shown.json()["id"] == "secret"
    assert [answer.status_code for answer in refused] == [403] * 4
    assert "secret" not in str(own)
    assert "tenant" not in own["data"][0]
    assert (erased.status_code, erased.json()["error"]["code"]) == (403, "tenant_required")


async def test_nodes_are_paged_and_filtered_by_state():
    async with rig("abc") as fabric:
        http = fabric.http()
        await http.post("/v1/nodes/node-b/drain")
        first = await listed(http, "/v1/nodes?limit=2")
        second = await listed(http, f"/v1/nodes?after={first['last_id']}")
        ready = await listed(http, "/v1/nodes?state=ready")
    assert [row["name"] for row in first["data"]] == ["node-a", "node-b"]
    assert ([row["name"] for row in second["data"]], second["has_more"]) == (["node-c"], False)
    assert "node-b" not in [row["name"] for row in ready["data"]]


async def test_decisions_are_paged_and_filtered():
    async with rig("ab") as fabric:
        http = fabric.http()
        for number in range(5):
            await fabric.chat(f"hello {number}", agent=f"agent-{number}")
        path = "/v1/placement/decisions"
        first = await listed(http, f"{path}?limit=2")
        rest = await listed(http, f"{path}?after={first['last_id']}")
        turn = first["data"][0]["turn"]
        one = await listed(http, f"{path}?turn={turn}")
        node = await listed(http, f"{path}?node=node-a")
        invalid = await http.get(f"{path}?after=7")
    ids = [row["id"] for row in (*first["data"], *rest["data"])]
    assert ids == ["dec_5", "dec_4", "dec_3", "dec_2", "dec_1"]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [row["id"] for row in one["data"]] == ["dec_5"]
    assert {row["served_by"] for row in node["data"]} <= {"node-a"}
    assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "after")


async def test_events_are_filtered_and_end_at_their_limit():
    async with rig("ab") as fabric:
        http = fabric.http()
        path = "/v1/events?name=turn&agent=mira&limit=2&snapshot=false"
        async with following(http, path=path) as stream:
            await fabric.chat("hello", agent="other")
            await fabric.chat("hello there", agent="mira")
            await fabric.chat("hello there", "x", "again", agent="mira")
            events = [event async for event in stream]
    assert [(event.name, event.data["id"]) for event in events] == [
        ("turn.began", "mira"),
        ("turn.ended", "mira"),
    ]


async def test_operator_may_follow_one_tenant():
    async with rig("ab", settings=TENANTS) as fabric:
        one, two = (fabric.http(key, operates=False) for key in (KEY, OTHER_KEY))
        await fabric.chat("hello", agent="early", http=two)
        ops = fabric.http(OPERATOR_KEY, operates=False)
        async with following(ops, path="/v1/events?tenant=one&name=turn&limit=1") as stream:
            await fabric.chat("hello", agent="secret", http=two)
            await fabric.chat("hello there", agent="mira", http=one)
            events = [event async for event in stream]
    assert [event.name for event in events] == ["snapshot", "turn.began"]
    assert events[0].data["agents"] == []
    assert events[1].data["id"] == "mira"
