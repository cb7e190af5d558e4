"""Fabric-wide routes take an operator's key; tenants see their own."""

import pytest

from fabric.keys import OPERATOR_HEADER
from fabric.settings import RouterSettings
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, OPERATOR_KEY, OTHER_KEY, rig

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=0.3
)
OPERATORS_ONLY = [
    ("POST", "/v1/nodes/node-a/drain"),
    ("POST", "/v1/nodes/node-a/undrain"),
    ("POST", "/v1/nodes/node-a/flush"),
    ("POST", "/v1/nodes/node-z/drain"),
    ("GET", "/metrics"),
    ("GET", "/v1/placement/decisions"),
]
TENANT_FIELDS = {
    *("name", "state", "health", "model", "fingerprint", "context_tokens_max"),
    *("prompt_bytes_max", "sampling"),
    *("agents", "tokens", "bytes", "drain"),
}


@pytest.mark.parametrize(("method", "path"), OPERATORS_ONLY)
@pytest.mark.parametrize("key", [KEY, None], ids=["tenant", "keyless"])
async def test_operator_routes_refuse_tenants_with_403(method, path, key):
    settings = TENANTS if key else RouterSettings(takeover_after_s=0.3)
    async with rig("ab", settings=settings) as fabric:
        response = await fabric.http(key, operates=False).request(method, path)
        ready = fabric.fleet.ready()

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (403, "operator_required")
    assert error["type"] == "invalid_request_error"
    assert OPERATOR_HEADER in error["message"]
    assert "operator_keys" in error["message"]
    assert len(ready) == 2


@pytest.mark.parametrize("bearer", [True, False], ids=["bearer", "header"])
async def test_operator_key_works_without_a_tenant(bearer):
    async with rig("ab", settings=TENANTS) as fabric:
        http = fabric.http(OPERATOR_KEY if bearer else None, operates=not bearer)
        answers = [await http.request(*each) for each in OPERATORS_ONLY]
        agents = await http.get("/v1/agents")
        chat = await fabric.chat("hello", http=http)

    assert [answer.status_code for answer in answers] == [202, 200, 200, 404, 200, 200]
    assert (agents.status_code, agents.json()["error"]["code"]) == (403, "tenant_required")
    assert chat.status_code == 403
    assert "operator" in chat.json()["error"]["message"]


async def test_tenant_and_operator_keys_combine():
    async with rig("a", settings=TENANTS) as fabric:
        http = fabric.http(KEY)
        chat = await fabric.chat("hello", agent="alice", http=http)
        listed = (await http.get("/v1/agents")).json()["data"]
        metrics = await http.get("/metrics")
        wrong = await fabric.http(KEY, operates=False).get(
            "/v1/nodes", headers={OPERATOR_HEADER: "not-an-operators-key"}
        )

    assert chat.status_code == metrics.status_code == 200
    assert [agent["id"] for agent in listed] == ["alice"]
    assert wrong.status_code == 401


async def test_unknown_tenant_key_is_refused_beside_an_operator_key():
    """Otherwise a mistyped key would erase the default tenant's agent of that name."""
    settings = RouterSettings(api_keys={"one": KEY}, takeover_after_s=0.3)
    async with rig("a", settings=settings) as fabric:
        await fabric.chat("hello", agent="alice", http=fabric.http())
        erased = await fabric.http("mistyped-key-0123").delete("/v1/agents/alice")
        operator = await fabric.http(OPERATOR_KEY).get("/v1/agents/alice")
        kept = await fabric.http().get("/v1/agents/alice")

    assert erased.status_code == 401, erased.text
    assert operator.status_code == kept.status_code == 200


async def test_node_list_shows_tenants_their_own_counts():
    async with rig("a", settings=TENANTS) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        await fabric.chat("x" * 2000, agent="alice", http=one)
        before = (await two.get("/v1/nodes")).json()["data"]
        await fabric.chat("y" * 4000, agent="secret-name", http=one)
        mine = (await one.get("/v1/nodes")).json()["data"][0]
        theirs = await two.get("/v1/nodes")
        full = (await fabric.http().get("/v1/nodes")).json()["data"][0]

    assert set(mine) == TENANT_FIELDS
    assert mine["agents"] == 2
    assert mine["tokens"] > 0
    assert theirs.json()["data"] == before, "another tenant's activity is hidden"
    assert theirs.json()["data"][0]["agents"] == 0
    assert full.keys() > TENANT_FIELDS
    assert full["pid"]


async def test_drain_shows_tenants_their_own_agents_without_counts():
    async with rig("ab", settings=TENANTS) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        await fabric.chat("x" * 2000, agent="alice", http=one)
        home = next(n.name for n in fabric.nodes.values() if n.memory)
        await fabric.http().post(f"/v1/nodes/{home}/drain")
        rows = {r["name"]: r["drain"] for r in (await two.get("/v1/nodes")).json()["data"]}

    assert set(rows[home]) == {"node", "object", "state", "stuck"}
    assert rows[home]["stuck"] == []


async def test_health_details_are_for_operators_only():
    async with rig("a", settings=TENANTS) as fabric:
        stranger = await fabric.http(operates=False).get("/healthz")
        wrong = await fabric.http("not-a-key-of-ours", operates=False).get("/healthz")
        tenant = await fabric.http(KEY, operates=False).get("/healthz")
        operator = await fabric.http().get("/healthz")

    assert stranger.json() == wrong.json() == tenant.json() == {"status": "ok"}
    assert operator.json()["nodes"][0]["name"] == "node-a"
    assert operator.json()["version"]


async def test_errors_truncate_names_from_clients():
    name = "z" * 50_000
    async with rig("a") as fabric:
        http = fabric.http()
        await fabric.chat("hello", agent="alice", http=http)
        answers = [
            await http.post("/v1/agents/alice/migrate", json={"to": name}),
            await http.post("/v1/agents/alice/fork", json={"as": "bob", "to": name}),
            await http.post("/v1/agents/alice/fork", json={"as": name}),
            await http.post("/v1/agents/alice/replicate", json={"to": name}),
            await http.post("/v1/agents/alice/prefetch", json={"to": name}),
            await http.post("/v1/nodes/" + name[:9000] + "/drain"),
            await http.get("/v1/models/" + name[:9000]),
            await http.get("/v1/agents/" + name[:9000]),
            await http.get("/" + name[:9000]),
            await fabric.chat("hello", http=http, model=name),
            await fabric.chat("hello", http=http, service_tier=name),
            await fabric.chat("hello", http=http, chat_template_kwargs={name: 1}),
            await fabric.chat("hello", http=http, logit_bias={name: 1}),
            await fabric.chat([{"type": name}], http=http),
            await http.post("/v1/agents/alice/fork", json={"as": "bob", "operation": name}),
            await http.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
                headers={"x-macfabric-priority": name[:9000]},
            ),
        ]

    for answer in answers:
        assert len(answer.text) < 1000
    accepted = [answer for answer in answers if answer.status_code == 200]
    assert len(accepted) == 2, "unknown options of the template, and parts of unknown types"
