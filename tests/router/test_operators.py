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
]
TOLD_TO_TENANTS = {
    *("name", "state", "health", "model", "fingerprint", "context_tokens_max"),
    *("prompt_bytes_max", "sampling"),
    *("agents", "tokens", "bytes", "drain"),
}


@pytest.mark.parametrize(("method", "path"), OPERATORS_ONLY)
@pytest.mark.parametrize("key", [KEY, None], ids=["tenant", "keyless"])
async def test_tenants_are_told_what_is_needed(method, path, key):
    settings = TENANTS if key else RouterSettings(takeover_after_s=0.3)
    async with rig("ab", settings=settings) as made:
        got = await made.http(key, operates=False).request(method, path)
        ready = made.fleet.ready()

    error = got.json()["error"]
    assert (got.status_code, error["code"]) == (403, "operator_required")
    assert error["type"] == "invalid_request_error"
    assert OPERATOR_HEADER in error["message"]
    assert "operator_keys" in error["message"]
    assert len(ready) == 2


@pytest.mark.parametrize("bearer", [True, False], ids=["bearer", "header"])
async def test_operators_need_no_tenant(bearer):
    async with rig("ab", settings=TENANTS) as made:
        http = made.http(OPERATOR_KEY if bearer else None, operates=not bearer)
        answers = [await http.request(*each) for each in OPERATORS_ONLY]
        agents = await http.get("/v1/agents")
        chat = await made.chat("hello", http=http)

    assert [answer.status_code for answer in answers] == [202, 200, 200, 404, 200]
    assert (agents.status_code, agents.json()["error"]["code"]) == (403, "tenant_required")
    assert chat.status_code == 403
    assert "operator" in chat.json()["error"]["message"]


async def test_both_keys_in_one_request():
    async with rig("a", settings=TENANTS) as made:
        http = made.http(KEY)
        chat = await made.chat("hello", agent="alice", http=http)
        listed = (await http.get("/v1/agents")).json()["data"]
        metrics = await http.get("/metrics")
        wrong = await made.http(KEY, operates=False).get(
            "/v1/nodes", headers={OPERATOR_HEADER: "not-an-operators-key"}
        )

    assert chat.status_code == metrics.status_code == 200
    assert [agent["id"] for agent in listed] == ["alice"]
    assert wrong.status_code == 401


async def test_tenants_see_of_nodes_what_is_their_own():
    async with rig("a", settings=TENANTS) as made:
        one, two = made.http(KEY, operates=False), made.http(OTHER_KEY, operates=False)
        await made.chat("x" * 2000, agent="alice", http=one)
        before = (await two.get("/v1/nodes")).json()["data"]
        await made.chat("y" * 4000, agent="secret-name", http=one)
        mine = (await one.get("/v1/nodes")).json()["data"][0]
        theirs = await two.get("/v1/nodes")
        full = (await made.http().get("/v1/nodes")).json()["data"][0]

    assert set(mine) == TOLD_TO_TENANTS
    assert mine["agents"] == 2
    assert mine["tokens"] > 0
    assert theirs.json()["data"] == before, "nothing of another tenant's doings shows"
    assert theirs.json()["data"][0]["agents"] == 0
    assert full.keys() > TOLD_TO_TENANTS
    assert full["pid"]


async def test_a_drain_shows_tenants_their_own_agents_and_no_counts():
    async with rig("ab", settings=TENANTS) as made:
        one, two = made.http(KEY, operates=False), made.http(OTHER_KEY, operates=False)
        await made.chat("x" * 2000, agent="alice", http=one)
        home = next(n.name for n in made.nodes.values() if n.memory)
        await made.http().post(f"/v1/nodes/{home}/drain")
        rows = {r["name"]: r["drain"] for r in (await two.get("/v1/nodes")).json()["data"]}

    assert set(rows[home]) == {"node", "object", "state", "stuck"}
    assert rows[home]["stuck"] == []


async def test_health_says_to_each_what_concerns_them():
    async with rig("a", settings=TENANTS) as made:
        stranger = await made.http(operates=False).get("/healthz")
        wrong = await made.http("not-a-key-of-ours", operates=False).get("/healthz")
        tenant = await made.http(KEY, operates=False).get("/healthz")
        operator = await made.http().get("/healthz")

    assert stranger.json() == wrong.json() == tenant.json() == {"status": "ok"}
    assert operator.json()["nodes"][0]["name"] == "node-a"
    assert operator.json()["version"]


async def test_errors_repeat_little_of_what_a_client_named():
    name = "z" * 50_000
    async with rig("a") as made:
        http = made.http()
        await made.chat("hello", agent="alice", http=http)
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
            await made.chat("hello", http=http, model=name),
            await made.chat("hello", http=http, service_tier=name),
            await made.chat("hello", http=http, chat_template_kwargs={name: 1}),
            await made.chat("hello", http=http, logit_bias={name: 1}),
            await made.chat([{"type": name}], http=http),
            await http.post("/v1/agents/alice/fork", json={"as": "bob", "operation": name}),
            await http.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
                headers={"x-macfabric-priority": name[:9000]},
            ),
        ]

    for answer in answers:
        assert len(answer.text) < 1000
    taken = [answer for answer in answers if answer.status_code == 200]
    assert len(taken) == 2, "unknown options of the template, and parts of unknown types"
