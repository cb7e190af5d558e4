"""The fleet's event stream, as dashboards follow it."""

import asyncio
import json

import pytest

from fabric.settings import RouterSettings
from router.admin import events as module
from router.admin.views import events as views
from router.events import AgentErased, NodeChanged
from router.limits import FLEET_EVENTS_MAX
from router.moves import migration
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.router.sse_reader import following
from tests.router.test_operators import TENANT_FIELDS

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=20.0
)


def names(events):
    return [event.name for event in events]


async def test_event_stream_shows_chat_and_move_to_operator():
    async with rig("ab") as fabric, following(fabric.http()) as stream:
        first = await stream.next()
        node = (await fabric.chat("x" * 300, agent="alice")).headers["x-macfabric-node"]
        chat = await stream.until("turn.ended")
        other = "node-b" if node == "node-a" else "node-a"
        await fabric.http().post("/v1/agents/alice/migrate", json={"to": other})
        moved = await stream.until("move.state", state="committed")

    assert first.name == "snapshot"
    assert first.data["agents"] == first.data["moves"] == []
    assert [row["name"] for row in first.data["nodes"]] == ["node-a", "node-b"]
    assert first.data["health"]["status"] == "ok"
    chat = [event for event in chat if event.name.startswith(("agent.", "turn."))]
    assert names(chat) == ["agent.created", "turn.began", "turn.ended"]
    created, began, ended = (event.data for event in chat)
    assert {"tenant": "default", "id": "alice", "node": node, "epoch": 1}.items() <= created.items()
    assert (began["cache"], began["cached_tokens"]) == ("cold", 0)
    assert began["prompt_tokens"] > 300
    assert (ended["outcome"], ended["node"]) == ("ok", node)
    moves = [event.data for event in moved if event.name == "move.state"]
    assert [move["state"] for move in moves[:2]] == ["copying", "copying"]
    assert [move["state"] for move in moves[-2:]] == ["sealed", "committed"]
    assert moves[-1]["bytes_sent"] > 0
    assert (moves[0]["from"], moves[0]["to"]) == (node, other)
    moved_event = next(event.data for event in moved if event.name == "agent.moved")
    assert (moved_event["from"], moved_event["to"], moved_event["epoch"]) == (node, other, 2)


async def test_long_copy_reports_how_much_of_the_agent_has_arrived(monkeypatch):
    monkeypatch.setattr(migration, "PROGRESS_S", 0.02)
    async with rig("ab") as fabric, following(fabric.http()) as stream:
        node = (await fabric.chat("x" * 300, agent="alice")).headers["x-macfabric-node"]
        target = fabric["node-b" if node == "node-a" else "node-a"]
        target.view_changes = {"fetching": {"bytes": 1000}}  # of an earlier move
        await fabric.fleet.membership.refresh()
        (whole,) = (await fabric.http().get("/v1/agents")).json()["data"]
        target.behaviour.slow = {"copy_blocks": 0.6}
        moving = asyncio.create_task(
            fabric.http().post("/v1/agents/alice/migrate", json={"to": target.name})
        )
        await stream.until("move.state", state="copying")
        for bytes_fetched in (1001, 10**9):  # the second fetched other agents as well
            target.view_changes = {"fetching": {"bytes": bytes_fetched}}
            await fabric.fleet.membership.refresh()
            await asyncio.sleep(0.1)
        await moving
        moved = await stream.until("move.state", state="committed")

    moves = [event.data for event in moved if event.name == "move.state"]
    sizes = [(move["bytes_sent"], move["bytes_total"]) for move in moves]
    total = whole["bytes"]["disk"]
    assert sizes[:2] == [(1, total), (total, total)]  # no further event without progress
    assert all(sent <= total for sent, total in sizes)


async def test_snapshot_equals_rest_listings():
    async with rig("ab", settings=TENANTS) as fabric:
        http = fabric.http(KEY)
        one = fabric.http(KEY, operates=False)
        await fabric.chat("hello", agent="alice", http=http)
        await fabric.chat("hello", agent="bob", http=fabric.http(OTHER_KEY))
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


async def test_tenant_sees_events_of_its_own_agents_only():
    async with rig("ab", settings=TENANTS) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        await fabric.chat("y" * 4000, agent="early-secret", http=two)
        async with following(one) as stream:
            shown = await stream.next()
            node = (await fabric.chat("x", agent="secret", http=two)).headers["x-macfabric-node"]
            other = "node-b" if node == "node-a" else "node-a"
            await two.post("/v1/agents/secret/migrate", json={"to": other})
            await two.post("/v1/agents/secret/fork", json={"as": "secret-fork"})
            await two.delete("/v1/agents/secret-fork")
            await fabric.http().post("/v1/nodes/node-a/drain")
            await until(lambda: fabric.services.drains.find("node-a").state == "drained")
            await fabric.chat("hello", agent="alice", http=one)
            events = await stream.until("turn.ended")
            ids = [event.id for event in events]
        after = (await one.get("/v1/agents")).json()["data"]

    text = json.dumps([shown.data, *(event.data for event in events)])
    assert "secret" not in text
    assert "two" not in text
    assert shown.data["agents"] == []
    assert {key for row in shown.data["nodes"] for key in row} <= TENANT_FIELDS
    assert set(names(events)) <= {"node.state", "agent.created", "turn.began", "turn.ended"}
    for event in events:
        if event.name == "node.state":
            assert event.data.keys() == {"at_s", "node", "state", "before"}
        else:
            assert event.data["id"] == "alice"
    assert [row["id"] for row in after] == ["alice"]
    assert len(set(ids)) == len(ids)


async def test_event_stream_reports_forks_and_erasures():
    async with rig("ab") as fabric, following(fabric.http()) as stream:
        node = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        await fabric.http().post("/v1/agents/alice/fork", json={"as": "ivan"})
        forked = await stream.until("agent.forked", id="ivan")
        await fabric.http().delete("/v1/agents/ivan")
        erased = await stream.until("agent.erased")

    assert {"forked_from": "alice", "node": node}.items() <= forked[-1].data.items()
    assert any(t.name == "agent.created" and t.data["id"] == "ivan" for t in forked)
    assert erased[-1].data.keys() == {"at_s", "tenant", "id"}
    assert erased[-1].data["id"] == "ivan"


async def test_failed_move_event_carries_error_code():
    async with rig("ab") as fabric, following(fabric.http()) as stream:
        node = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        other = "node-b" if node == "node-a" else "node-a"

        fabric[node].after["seal_agent"] = fabric[other].stop
        response = await fabric.http().post("/v1/agents/alice/migrate", json={"to": other})
        events = await stream.until("move.state", state="failed")

    assert events[-1].data["code"] == response.json()["error"]["code"]
    assert fabric.services.moves.progress() == ()


async def test_operator_without_tenant_may_follow_but_stranger_gets_401():
    async with rig("a", settings=TENANTS) as fabric:
        async with following(fabric.http()) as stream:
            assert (await stream.next()).name == "snapshot"
        response = await fabric.http(operates=False).get("/v1/events")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_reconnect_with_last_event_id_replays_missed_events():
    async with rig("a") as fabric:
        async with following(fabric.http()) as stream:
            await stream.next()
            await fabric.chat("hello", agent="alice")
            last_id = (await stream.until("turn.ended"))[-1].id
        await fabric.chat("hello", agent="bob")
        async with following(fabric.http(), last_id) as stream:
            events = await stream.until("turn.ended")
        async with following(fabric.http(), "of-another-router") as stream:
            snapshot = await stream.next()

    assert [event.data["id"] for event in events if event.name == "agent.created"] == ["bob"]
    assert "snapshot" not in names(events)
    assert snapshot.name == "snapshot"


async def test_slow_client_gets_missed_count_and_fresh_snapshot(monkeypatch):
    monkeypatch.setattr(module, "FLEET_SNAPSHOT_EVERY_S", 0.05)
    async with rig("a") as fabric, following(fabric.http()) as stream:
        await stream.next()
        await fabric.chat("hello", agent="alice")
        await stream.until("turn.ended")
        # In one step, so that no client reads in between.
        for number in range(3 * FLEET_EVENTS_MAX):
            fabric.fleet.events.publish(AgentErased(("default", f"gone-{number}")))
        events = await stream.until("snapshot")
        await fabric.chat("hello", agent="bob")
        further = await stream.until("turn.ended")

    missed, shown = events[-2:]
    assert names(events) == ["missed", "snapshot"]
    assert missed.data["count"] == 3 * FLEET_EVENTS_MAX
    assert [row["id"] for row in shown.data["agents"]] == ["alice"]
    assert further[0].data["id"] == "bob"


async def test_stalled_client_blocks_neither_turns_nor_events():
    async with rig("a") as fabric:
        reader, writer = await asyncio.open_connection(
            *fabric.url.removeprefix("http://").split(":")
        )
        fabric.writers.append(writer)
        writer.write(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"event: snapshot")
        writer.transport.pause_reading()
        (follower,) = fabric.fleet.events._followers
        for number in range(200):
            for _ in range(100):
                event = AgentErased(("default", "x" * 100 + str(number)))
                fabric.fleet.events.publish(event)
            await asyncio.sleep(0)
            assert len(follower._waiting) <= FLEET_EVENTS_MAX
        answer = await fabric.chat("hello", agent="alice")

    assert answer.status_code == 200


async def test_disconnected_follower_is_removed():
    async with rig("a") as fabric:
        async with following(fabric.http()) as stream:
            await stream.next()
            assert len(fabric.fleet.events._followers) == 1
        await until(lambda: not fabric.fleet.events._followers)


async def test_excess_followers_get_429(monkeypatch):
    async with rig("a") as fabric:
        for _ in range(32):
            fabric.fleet.events.follow("default", "default")
        response = await fabric.http().get("/v1/events")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert response.headers["retry-after"]


async def test_event_stream_reports_joining_silent_and_draining_nodes():
    async with rig("ab", scale=4.0) as fabric, following(fabric.http()) as stream:
        await stream.next()
        await fabric["node-b"].stop()
        lost = await stream.until("node.state", node="node-b", state="expired")
        await fabric["node-b"].restart()
        back = await stream.until("node.state", node="node-b", state="ready")
        await fabric.http().post("/v1/nodes/node-a/drain")
        drained = await stream.until("drain.state", node="node-a", state="drained")
        await fabric.http().post("/v1/nodes/node-a/undrain")
        await stream.until("node.state", node="node-a", state="ready", before="draining")

    states = [t.data["state"] for t in lost if t.data["node"] == "node-b"]
    assert states[-2:] == ["suspect", "expired"]
    assert back[-1].data["before"] == "expired"
    assert drained[-1].data["agents_left"] == 0


async def test_snapshot_is_bounded_and_counts_omitted_agents(monkeypatch):
    monkeypatch.setattr(views, "FLEET_SNAPSHOT_AGENTS_MAX", 2)
    monkeypatch.setattr(views, "AGENTS_AT_ONCE", 1)
    async with rig("a") as fabric:
        for agent in ("alice", "bob", "carol"):
            await fabric.chat("hello", agent=agent)
        await fabric.fleet.membership.refresh(relist=True)
        async with following(fabric.http()) as stream:
            shown = (await stream.next()).data

    assert len(shown["agents"]) == 2
    assert shown["agents_left_out"] == 1


async def test_stopping_router_ends_event_streams():
    async with rig("a") as fabric, following(fabric.http()) as stream:
        await stream.next()
        fabric.fleet.events.publish(NodeChanged("node-z", "ready", None))
        fabric.fleet.events.close()
        assert [(await stream.next()).data["node"], await stream.next()] == ["node-z", None]


async def test_past_events_are_answered_at_once_and_filtered():
    async with rig("ab", settings=TENANTS) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        for agent in ("alice", "bob"):
            await fabric.chat("hello", agent=agent, http=one)
        await fabric.chat("hello", agent="secret", http=two)
        past = "/v1/events?follow=false"
        read = {}
        for name, http, path in (
            ("all", fabric.http(), past),
            ("own", one, past),
            ("last", one, f"{past}&name=agent.created&limit=1"),
        ):
            async with following(http, path=path) as stream:
                read[name] = [event async for event in stream]

    created = [e.data["id"] for e in read["all"] if e.name == "agent.created"]
    assert created == ["alice", "bob", "secret"]
    own = [e.data["id"] for e in read["own"] if e.name == "turn.ended"]
    assert own == ["alice", "bob"]
    assert not [e for e in read["own"] if e.data.get("id") == "secret"]
    assert [e.data["id"] for e in read["last"]] == ["bob"]
