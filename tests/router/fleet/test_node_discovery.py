"""Requests that name an agent or a node wait until a new router has heard its nodes."""

import asyncio

import pytest

from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from router.fleet.directory import Directory, EpochMap
from tests.router.fake_memory import Memory, block_names
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until
from tests.support.moves import migrate

pytestmark = pytest.mark.anyio
KEY = ("default", "alice")
AGENT, NODE = "/v1/agents/alice", "/v1/nodes/node-a"
REQUESTS = {
    "show": ("GET", AGENT, None),
    "erase": ("DELETE", AGENT, None),
    "pin": ("POST", f"{AGENT}/pin", {"pinned": True}),
    "migrate": ("POST", f"{AGENT}/migrate", {"to": "node-b"}),
    "fork": ("POST", f"{AGENT}/fork", {"as": "bob"}),
    "replicate": ("POST", f"{AGENT}/replicate", {"to": "node-b"}),
    "prefetch": ("POST", f"{AGENT}/prefetch", {}),
    "cancel": ("DELETE", f"{AGENT}/prefetch", None),
    "hibernate": ("POST", f"{AGENT}/hibernate", None),
    "drain": ("POST", f"{NODE}/drain", {}),
    "undrain": ("POST", f"{NODE}/undrain", {}),
    "flush": ("POST", f"{NODE}/flush", {}),
    "model": ("GET", "/v1/models/echo", None),
}


def two():
    nodes = [FakeNode("node-a"), FakeNode("node-b")]
    nodes[0].memory[KEY] = Memory(*KEY, epoch=3, text="x" * 300)
    return nodes


async def ask(made, name):
    verb, path, body = REQUESTS[name]
    return await made.http().request(verb, path, json=body)


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_wait_for_the_nodes_reports(name):
    async with rig(nodes=two(), started=False, tended=False) as made:
        asking = asyncio.create_task(ask(made, name))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        made.services.erasure_exchange._heard |= {
            "node-a",
            "node-b",
        }  # else greetings wait for each other
        await made.fleet.membership.discover()
        await made.fleet.membership.refresh()
        answer = await asking

    assert waited
    assert answer.status_code != 404 or name == "hibernate", "a fake node has no such route"
    assert answer.json().get("error", {}).get("code") not in ("unknown_agent", "unknown_node")
    if name == "erase":
        assert answer.json()["deleted"] is True
        assert made["node-a"].memory == {}


@pytest.mark.parametrize("name", [*REQUESTS, "list"])
async def test_without_any_report_requests_are_to_be_retried(name, monkeypatch):
    monkeypatch.setitem(REQUESTS, "list", ("GET", "/v1/agents", None))
    async with rig("a", started=False, tended=False, scale=50) as made:
        answer = await ask(made, name)

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_no_agent_is_unknown_while_a_node_has_not_reported():
    nodes = two()
    async with rig(nodes=nodes, scale=8.0, started=False) as made:
        await nodes[0].stop()
        http = made.http()
        answers = {name: await ask(made, name) for name in ("show", "pin", "migrate", "fork")}
        listed = (await http.get("/v1/agents")).json()
        await nodes[0].start()
        await until(made.fleet.membership.has_all_reports)
        after = (await http.get("/v1/agents")).json()
        shown = await ask(made, "show")
        nobody = await http.get("/v1/agents/nobody")

    assert {a.json()["error"]["code"] for a in answers.values()} == {"agents_unknown"}
    assert {a.status_code for a in answers.values()} == {503}
    assert (listed["data"], listed["complete"], listed["unheard"]) == ([], False, ["node-a"])
    assert [agent["id"] for agent in after["data"]] == ["alice"]
    assert (after["complete"], after["unheard"]) == (True, [])
    assert shown.status_code == 200
    assert nobody.status_code == 404


def gathering():
    """Return a router that expects two nodes, of which Ray knows one; the other has alice."""
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="other")]
    nodes[1].memory[KEY] = Memory(*KEY, epoch=3, text="x" * 300)
    settings = RouterSettings(nodes_expected=2)
    return rig(nodes=nodes, settings=settings, started=False, tended=False)


async def met(made, *names):
    """Put only these nodes on Ray's list, and have them report."""
    made.listed.clear()
    made.listed.update({name: made[name] for name in names})
    made.services.erasure_exchange._heard |= set(names)
    await made.fleet.membership.discover()
    await made.fleet.membership.refresh()


def of_node_b(monkeypatch):
    for name, (verb, path, body) in list(REQUESTS.items()):
        elsewhere = path.replace("node-a", "node-b").replace("echo", "other")
        monkeypatch.setitem(REQUESTS, name, (verb, elsewhere, body))


@pytest.mark.parametrize("name", REQUESTS)
async def test_nothing_is_unknown_before_all_expected_nodes_have_joined(name, monkeypatch):
    of_node_b(monkeypatch)
    async with gathering() as made:
        await met(made, "node-a")
        early = await ask(made, name)
        listed = (await made.http().get("/v1/agents")).json()
        await met(made, "node-a", "node-b")
        late = await ask(made, name)
        complete = (await made.http().get("/v1/agents")).json()
        left = made["node-b"].memory

    assert early.status_code == 503, early.text
    assert early.json()["error"]["code"] in ("agents_unknown", "nodes_unknown")
    assert "1 of 2 nodes" in early.text or "1 are still missing" in early.text
    assert int(early.headers["retry-after"]) >= 1
    assert (listed["complete"], listed["unmet"]) == (False, 1)
    assert (complete["complete"], complete["unmet"]) == (True, 0)
    if name == "erase":
        assert left == {}, "whoever comes later learns of an erasure"
    else:
        code = late.json().get("error", {}).get("code")
        assert code not in ("agents_unknown", "nodes_unknown", "unknown_agent", "unknown_node")


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"cancel"}))
async def test_a_node_that_is_late_is_no_longer_waited_for(name, monkeypatch):
    of_node_b(monkeypatch)
    monkeypatch.setattr("router.fleet.node_discovery.GATHER_S", 0.0)
    async with gathering() as made:
        await met(made, "node-a")
        answer = await ask(made, name)
        new = await made.chat("hi", agent="alice")

    if name == "erase":
        assert answer.json()["unreachable"] == ["1 node without a known name"]
    else:
        assert answer.status_code == 404, answer.text
    assert int(new.headers["x-macfabric-epoch"]) > 1_024, "that node may still own an alice"


async def test_known_agents_are_served_while_nodes_are_missing():
    async with gathering() as made:
        made["node-a"].memory["default", "mira"] = Memory(
            "default", "mira", epoch=1, text="y" * 300
        )
        await met(made, "node-a")
        shown = await made.http().get("/v1/agents/mira")
        model = await made.http().get("/v1/models/echo")
        turn = await made.chat("hi", agent="mira")

    assert [a.status_code for a in (shown, model, turn)] == [200, 200, 200]


async def test_an_erasure_before_the_owner_has_reported_is_refused():
    nodes = two()
    async with rig(nodes=nodes, scale=8.0, started=False) as made:
        await nodes[0].stop()
        first = await ask(made, "erase")
        await nodes[0].start()
        await until(made.fleet.membership.has_all_reports)
        assert nodes[0].memory == {}

    assert first.status_code == 200
    assert (first.json()["deleted"], first.json()["unreachable"]) == (False, ["node-a"])


async def test_a_fork_starts_above_an_unreported_owner():
    nodes = two()
    nodes[1].memory["default", "mira"] = Memory("default", "mira", epoch=1, text="y" * 300)
    nodes[1].blocks |= block_names("y" * 300)
    async with rig(nodes=nodes, scale=8.0, started=False) as made:
        await nodes[0].stop()
        await until(made.fleet.membership.settled)
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        path = "/v1/agents/mira/fork"
        forked = await made.http().post(path, json={"as": "alice", "to": "node-b"})

    assert forked.status_code == 200, forked.text
    assert forked.json()["epoch"] > 1_024


@pytest.mark.parametrize("how", ["served", "moved"])
@pytest.mark.parametrize("epochs", [(3, 2), (3, 2, 1), (3, 2, 2)])
async def test_an_owner_continues_above_an_unreported_later_one(how, epochs):
    """Else what it remembers from then on is fenced away when the other comes back.

    A claim older than its own, which it is heard to have won over, says nothing of a later one.
    """
    nodes = [FakeNode("node-a"), FakeNode("node-b"), FakeNode("node-c")]
    for node, epoch in zip(nodes, epochs, strict=False):
        node.memory["default", "alice"] = Memory("default", "alice", epoch=epoch, text="y" * 300)
        node.memory["default", "alice"].revision = 3 if node.name == "node-b" else 1
        node.blocks |= block_names("y" * 300)
    async with rig(nodes=nodes, scale=8.0, started=False) as made:
        await nodes[0].stop()
        await until(made.fleet.membership.settled)
        await until(lambda: not made.fleet.directory.in_doubt())
        if how == "moved":
            moved = await migrate(made, "node-c")
            assert moved.json()["epoch"] > 1_024, moved.text
        turns = [await made.chat("hi", agent="alice") for _ in range(2)]
        await nodes[0].start()
        await until(made.fleet.membership.has_all_reports)
        turns.append(await made.chat("hi", agent="alice"))

    served = "node-b" if how == "served" else "node-c"
    assert {turn.headers["x-macfabric-node"] for turn in turns} == {served}
    epochs = {int(turn.headers["x-macfabric-epoch"]) for turn in turns}
    assert len(epochs) == 1
    assert min(epochs) > 1_024


async def test_an_owner_continues_above_the_replica_of_a_later_one():
    """After two restarts, the second router's gap may be smaller than the first one's."""
    nodes = [FakeNode("node-a"), FakeNode("node-b"), FakeNode("node-c")]
    for node, epoch in zip(nodes, (9_000_000, 9_000_000, 1), strict=True):
        memory = Memory("default", "alice", epoch=epoch, text="y" * 300)
        node.memory["default", "alice"] = memory
    nodes[1].memory[KEY].state, nodes[1].memory[KEY].owner = OwnerState.REPLICA, "node-a"
    settings = RouterSettings(nodes_expected=3)
    async with rig(nodes=nodes, settings=settings, started=False) as made:
        replica, later = made.listed.pop("node-b"), made.listed.pop("node-a")
        await until(made.fleet.ready)
        first = await made.chat("hi", agent="alice")
        made.listed["node-b"] = replica
        await until(lambda: made.fleet.directory.highest(KEY) == 9_000_000)
        second = await made.chat("hi", agent="alice")
        made.listed["node-a"] = later
        await until(made.fleet.discovery.has_all_reports)
        third = await made.chat("hi", agent="alice")

    epochs = [int(turn.headers["x-macfabric-epoch"]) for turn in (first, second, third)]
    assert 1_024 < epochs[0] < 9_000_000 < epochs[1] == epochs[2]
    assert {turn.headers["x-macfabric-node"] for turn in (first, second, third)} == {"node-c"}


def test_one_tenants_many_epochs_evict_no_other_tenants():
    given = EpochMap(agents_max=10)
    given.note(("calm", "alice"), 7)
    for i in range(100):
        given.note(("loud", f"x{i}"), i)

    assert given.last(("calm", "alice")) == 7
    assert given.last(("loud", "x99")) == 99
    assert given.last(("loud", "x89")) == 0
    given.note(("calm", "alice"), 5)
    assert given.last(("calm", "alice")) == 7


def test_a_directory_bounds_what_it_gave_out_by_tenant(monkeypatch):
    monkeypatch.setattr("router.fleet.directory.EPOCHS_ISSUED_MAX", 4)
    directory = Directory()
    for note in (directory.issue, directory.promise):
        note(("calm", "alice"), 7)
        for i in range(9):
            note(("loud", f"x{i}"), 3)

    assert directory.next_epoch(("calm", "alice")) == 8
    assert directory.next_epoch(("loud", "x0")) == 0
