"""The fleet's event stream, as dashboards follow it."""

import asyncio
import json

import pytest

from fabric.settings import RouterSettings
from router.admin import events as module
from router.admin.views import events as views
from router.events import AgentErased, NodeChanged
from router.limits import FLEET_EVENTS_MAX
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.router.sse_reader import following
from tests.router.test_operators import TOLD_TO_TENANTS

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=20.0
)


def names(read):
    return [told.name for told in read]


async def test_an_operator_follows_a_chat_and_a_move():
    async with rig("ab") as made, following(made.http()) as stream:
        first = await stream.next()
        node = (await made.chat("x" * 300, agent="alice")).headers["x-macfabric-node"]
        chat = await stream.until("turn.ended")
        other = "node-b" if node == "node-a" else "node-a"
        await made.http().post("/v1/agents/alice/migrate", json={"to": other})
        moved = await stream.until("move.state", state="committed")

    assert first.name == "snapshot"
    assert first.data["agents"] == first.data["moves"] == []
    assert [row["name"] for row in first.data["nodes"]] == ["node-a", "node-b"]
    assert first.data["health"]["status"] == "ok"
    chat = [told for told in chat if told.name.startswith(("agent.", "turn."))]
    assert names(chat) == ["agent.created", "turn.began", "turn.ended"]
    created, began, ended = (told.data for told in chat)
    assert {"tenant": "default", "id": "alice", "node": node, "epoch": 1}.items() <= created.items()
    assert (began["cache"], began["cached_tokens"]) == ("cold", 0)
    assert began["prompt_tokens"] > 300
    assert (ended["outcome"], ended["node"]) == ("ok", node)
    moves = [told.data for told in moved if told.name == "move.state"]
    assert [move["state"] for move in moves[:2]] == ["copying", "copying"]
    assert [move["state"] for move in moves[-2:]] == ["sealed", "committed"]
    assert moves[-1]["bytes_sent"] > 0
    assert (moves[0]["from"], moves[0]["to"]) == (node, other)
    went = next(told.data for told in moved if told.name == "agent.moved")
    assert (went["from"], went["to"], went["epoch"]) == (node, other, 2)


async def test_a_snapshot_shows_what_the_routes_show():
    async with rig("ab", settings=TENANTS) as made:
        http = made.http(KEY)
        one = made.http(KEY, operates=False)
        await made.chat("hello", agent="alice", http=http)
        await made.chat("hello", agent="bob", http=made.http(OTHER_KEY))
        nodes = (await http.get("/v1/nodes")).json()["data"]
        own_nodes = (await one.get("/v1/nodes")).json()["data"]
        agents = (await one.get("/v1/agents")).json()["data"]
        health = (await http.get("/healthz")).json()
        async with following(http) as stream, following(one) as own_stream:
            shown, own = (await stream.next()).data, (await own_stream.next()).data

    assert own["agents"] == agents
    assert own["nodes"] == own_nodes
    assert own["health"] == {"status": "ok"}
    alice, bob = sorted(shown["agents"], key=lambda row: row["id"])
    assert (bob["tenant"], bob["id"]) == ("two", "bob")
    assert alice == agents[0] | {"tenant": "one"}
    assert [row.keys() for row in shown["nodes"]] == [row.keys() for row in nodes]
    assert shown["health"] == health


async def test_a_tenant_follows_its_own_agents_and_learns_of_no_others():
    async with rig("ab", settings=TENANTS) as made:
        one, two = made.http(KEY, operates=False), made.http(OTHER_KEY, operates=False)
        await made.chat("y" * 4000, agent="early-secret", http=two)
        async with following(one) as stream:
            shown = await stream.next()
            node = (await made.chat("x", agent="secret", http=two)).headers["x-macfabric-node"]
            other = "node-b" if node == "node-a" else "node-a"
            await two.post("/v1/agents/secret/migrate", json={"to": other})
            await two.post("/v1/agents/secret/fork", json={"as": "secret-fork"})
            await two.delete("/v1/agents/secret-fork")
            await made.http().post("/v1/nodes/node-a/drain")
            await until(lambda: made.services.drains.find("node-a").state == "drained")
            await made.chat("hello", agent="alice", http=one)
            read = await stream.until("turn.ended")
            ids = [told.id for told in read]
        after = (await one.get("/v1/agents")).json()["data"]

    text = json.dumps([shown.data, *(told.data for told in read)])
    assert "secret" not in text
    assert "two" not in text
    assert shown.data["agents"] == []
    assert {key for row in shown.data["nodes"] for key in row} <= TOLD_TO_TENANTS
    assert set(names(read)) <= {"node.state", "agent.created", "turn.began", "turn.ended"}
    for told in read:
        if told.name == "node.state":
            assert told.data.keys() == {"at_s", "node", "state", "before"}
        else:
            assert told.data["id"] == "alice"
    assert [row["id"] for row in after] == ["alice"]
    assert len(set(ids)) == len(ids)


async def test_forks_and_erasures_are_told():
    async with rig("ab") as made, following(made.http()) as stream:
        node = (await made.chat("hello", agent="alice")).headers["x-macfabric-node"]
        await made.http().post("/v1/agents/alice/fork", json={"as": "ivan"})
        forked = await stream.until("agent.forked", id="ivan")
        await made.http().delete("/v1/agents/ivan")
        erased = await stream.until("agent.erased")

    assert {"forked_from": "alice", "node": node}.items() <= forked[-1].data.items()
    assert any(t.name == "agent.created" and t.data["id"] == "ivan" for t in forked)
    assert erased[-1].data.keys() == {"at_s", "tenant", "id"}
    assert erased[-1].data["id"] == "ivan"


async def test_a_move_that_fails_says_why():
    async with rig("ab") as made, following(made.http()) as stream:
        node = (await made.chat("hello", agent="alice")).headers["x-macfabric-node"]
        other = "node-b" if node == "node-a" else "node-a"

        made[node].after["seal_agent"] = made[other].stop
        got = await made.http().post("/v1/agents/alice/migrate", json={"to": other})
        read = await stream.until("move.state", state="failed")

    assert read[-1].data["code"] == got.json()["error"]["code"]
    assert made.services.moves.progress() == ()


async def test_an_operator_without_a_tenant_follows_and_a_stranger_does_not():
    async with rig("a", settings=TENANTS) as made:
        async with following(made.http()) as stream:
            assert (await stream.next()).name == "snapshot"
        got = await made.http(operates=False).get("/v1/events")
    assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_who_comes_back_is_told_what_it_missed():
    async with rig("a") as made:
        async with following(made.http()) as stream:
            await stream.next()
            await made.chat("hello", agent="alice")
            seen = (await stream.until("turn.ended"))[-1].id
        await made.chat("hello", agent="bob")
        async with following(made.http(), seen) as stream:
            read = await stream.until("turn.ended")
        async with following(made.http(), "of-another-router") as stream:
            anew = await stream.next()

    assert [told.data["id"] for told in read if told.name == "agent.created"] == ["bob"]
    assert "snapshot" not in names(read)
    assert anew.name == "snapshot"


async def test_a_slow_client_is_told_how_much_it_missed_and_shown_everything_anew(monkeypatch):
    monkeypatch.setattr(module, "FLEET_SNAPSHOT_EVERY_S", 0.05)
    async with rig("a") as made, following(made.http()) as stream:
        await stream.next()
        await made.chat("hello", agent="alice")
        await stream.until("turn.ended")
        # At once, so that nobody can read in between.
        for number in range(3 * FLEET_EVENTS_MAX):
            made.fleet.events.publish(AgentErased(("default", f"gone-{number}")))
        read = await stream.until("snapshot")
        await made.chat("hello", agent="bob")
        further = await stream.until("turn.ended")

    missed, shown = read[-2:]
    assert names(read) == ["missed", "snapshot"]
    assert missed.data["count"] == 3 * FLEET_EVENTS_MAX
    assert [row["id"] for row in shown.data["agents"]] == ["alice"]
    assert further[0].data["id"] == "bob"


async def test_a_client_that_reads_nothing_holds_up_neither_turns_nor_events():
    async with rig("a") as made:
        reader, writer = await asyncio.open_connection(*made.url.removeprefix("http://").split(":"))
        made.writers.append(writer)
        writer.write(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"event: snapshot")
        writer.transport.pause_reading()
        (follower,) = made.fleet.events._followers
        for number in range(200):
            for _ in range(100):
                event = AgentErased(("default", "x" * 100 + str(number)))
                made.fleet.events.publish(event)
            await asyncio.sleep(0)
            assert len(follower._waiting) <= FLEET_EVENTS_MAX
        answer = await made.chat("hello", agent="alice")

    assert answer.status_code == 200


async def test_a_client_that_goes_leaves_nothing():
    async with rig("a") as made:
        async with following(made.http()) as stream:
            await stream.next()
            assert len(made.fleet.events._followers) == 1
        await until(lambda: not made.fleet.events._followers)


async def test_too_many_followers_are_refused(monkeypatch):
    async with rig("a") as made:
        for _ in range(32):
            made.fleet.events.follow("default", "default")
        got = await made.http().get("/v1/events")
    assert (got.status_code, got.json()["error"]["code"]) == (429, "overloaded")
    assert got.headers["retry-after"]


async def test_nodes_that_join_fall_silent_and_drain_are_told():
    async with rig("ab", scale=4.0) as made, following(made.http()) as stream:
        await stream.next()
        await made["node-b"].stop()
        lost = await stream.until("node.state", node="node-b", state="expired")
        await made["node-b"].restart()
        back = await stream.until("node.state", node="node-b", state="ready")
        await made.http().post("/v1/nodes/node-a/drain")
        drained = await stream.until("drain.state", node="node-a", state="drained")
        await made.http().post("/v1/nodes/node-a/undrain")
        await stream.until("node.state", node="node-a", state="ready", before="draining")

    states = [t.data["state"] for t in lost if t.data["node"] == "node-b"]
    assert states[-2:] == ["suspect", "expired"]
    assert back[-1].data["before"] == "expired"
    assert drained[-1].data["agents_left"] == 0


async def test_a_snapshot_is_bounded_and_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(views, "FLEET_SNAPSHOT_AGENTS_MAX", 2)
    monkeypatch.setattr(views, "AGENTS_AT_ONCE", 1)
    async with rig("a") as made:
        for agent in ("alice", "bob", "carol"):
            await made.chat("hello", agent=agent)
        await made.fleet.membership.refresh(relist=True)
        async with following(made.http()) as stream:
            shown = (await stream.next()).data

    assert len(shown["agents"]) == 2
    assert shown["agents_left_out"] == 1


async def test_a_router_that_stops_ends_the_streams():
    async with rig("a") as made, following(made.http()) as stream:
        await stream.next()
        made.fleet.events.publish(NodeChanged("node-z", "ready", None))
        made.fleet.events.close()
        assert [(await stream.next()).data["node"], await stream.next()] == ["node-z", None]
