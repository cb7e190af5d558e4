"""Requests that name an agent or a node wait until the nodes have reported to a new router."""

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


def two_nodes():
    nodes = [FakeNode("node-a"), FakeNode("node-b")]
    nodes[0].memory[KEY] = Memory(*KEY, epoch=3, text="x" * 300)
    return nodes


async def ask(fabric, name):
    verb, path, body = REQUESTS[name]
    return await fabric.http().request(verb, path, json=body)


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_wait_for_node_reports(name):
    async with rig(nodes=two_nodes(), started=False, tended=False) as fabric:
        asking = asyncio.create_task(ask(fabric, name))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        fabric.services.erasure_exchange._reporters |= {
            "node-a",
            "node-b",
        }  # otherwise handshakes wait for each other
        await fabric.fleet.membership.discover()
        await fabric.fleet.membership.refresh()
        answer = await asking

    assert waited
    assert answer.status_code != 404 or name == "hibernate", "fake nodes lack this route"
    assert answer.json().get("error", {}).get("code") not in ("unknown_agent", "unknown_node")
    if name == "erase":
        assert answer.json()["deleted"] is True
        assert fabric["node-a"].memory == {}


@pytest.mark.parametrize("name", [*REQUESTS, "list"])
async def test_requests_get_503_without_any_node_report(name, monkeypatch):
    monkeypatch.setitem(REQUESTS, "list", ("GET", "/v1/agents", None))
    async with rig("a", started=False, tended=False, scale=50) as fabric:
        answer = await ask(fabric, name)

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_missing_agent_is_503_while_a_node_has_not_reported():
    nodes = two_nodes()
    async with rig(nodes=nodes, scale=8.0, started=False) as fabric:
        await nodes[0].stop()
        http = fabric.http()
        answers = {name: await ask(fabric, name) for name in ("show", "pin", "migrate", "fork")}
        listed = (await http.get("/v1/agents")).json()
        await nodes[0].start()
        await until(fabric.fleet.membership.has_all_reports)
        after = (await http.get("/v1/agents")).json()
        shown = await ask(fabric, "show")
        unknown = await http.get("/v1/agents/nobody")

    assert {a.json()["error"]["code"] for a in answers.values()} == {"agents_unknown"}
    assert {a.status_code for a in answers.values()} == {503}
    assert (listed["data"], listed["complete"], listed["unheard"]) == ([], False, ["node-a"])
    assert [agent["id"] for agent in after["data"]] == ["alice"]
    assert (after["complete"], after["unheard"]) == (True, [])
    assert shown.status_code == 200
    assert unknown.status_code == 404


def gathering():
    """Return a router that expects two nodes; Ray lists one, and the other has alice."""
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="other")]
    nodes[1].memory[KEY] = Memory(*KEY, epoch=3, text="x" * 300)
    settings = RouterSettings(nodes_expected=2)
    return rig(nodes=nodes, settings=settings, started=False, tended=False)


async def join(fabric, *names):
    """Make Ray list only these nodes, and collect their reports."""
    fabric.listed.clear()
    fabric.listed.update({name: fabric[name] for name in names})
    fabric.services.erasure_exchange._reporters |= set(names)
    await fabric.fleet.membership.discover()
    await fabric.fleet.membership.refresh()


def requests_of_node_b(monkeypatch):
    for name, (verb, path, body) in list(REQUESTS.items()):
        elsewhere = path.replace("node-a", "node-b").replace("echo", "other")
        monkeypatch.setitem(REQUESTS, name, (verb, elsewhere, body))


@pytest.mark.parametrize("name", REQUESTS)
async def test_missing_names_are_503_until_expected_nodes_have_joined(name, monkeypatch):
    requests_of_node_b(monkeypatch)
    async with gathering() as fabric:
        await join(fabric, "node-a")
        early = await ask(fabric, name)
        listed = (await fabric.http().get("/v1/agents")).json()
        await join(fabric, "node-a", "node-b")
        late = await ask(fabric, name)
        complete = (await fabric.http().get("/v1/agents")).json()
        left = fabric["node-b"].memory

    assert early.status_code == 503, early.text
    assert early.json()["error"]["code"] in ("agents_unknown", "nodes_unknown")
    assert "1 of 2 nodes" in early.text or "1 are still missing" in early.text
    assert int(early.headers["retry-after"]) >= 1
    assert (listed["complete"], listed["unmet"]) == (False, 1)
    assert (complete["complete"], complete["unmet"]) == (True, 0)
    if name == "erase":
        assert left == {}, "a node that joins later gets the tombstone"
    else:
        code = late.json().get("error", {}).get("code")
        assert code not in ("agents_unknown", "nodes_unknown", "unknown_agent", "unknown_node")


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"cancel"}))
async def test_late_node_is_not_awaited_after_gathering_time(name, monkeypatch):
    requests_of_node_b(monkeypatch)
    monkeypatch.setattr("router.fleet.node_discovery.GATHER_S", 0.0)
    async with gathering() as fabric:
        await join(fabric, "node-a")
        answer = await ask(fabric, name)
        new = await fabric.chat("hi", agent="alice")

    if name == "erase":
        assert answer.json()["unreachable"] == ["1 node without a known name"]
    else:
        assert answer.status_code == 404, answer.text
    assert int(new.headers["x-macfabric-epoch"]) > 1_024, "that node may still own alice"


async def test_known_agents_are_served_while_nodes_are_missing():
    async with gathering() as fabric:
        fabric["node-a"].memory["default", "mira"] = Memory(
            "default", "mira", epoch=1, text="y" * 300
        )
        await join(fabric, "node-a")
        shown = await fabric.http().get("/v1/agents/mira")
        model = await fabric.http().get("/v1/models/echo")
        turn = await fabric.chat("hi", agent="mira")

    assert [a.status_code for a in (shown, model, turn)] == [200, 200, 200]


async def test_erasure_lists_unreported_owner_as_unreachable():
    nodes = two_nodes()
    async with rig(nodes=nodes, scale=8.0, started=False) as fabric:
        await nodes[0].stop()
        first = await ask(fabric, "erase")
        await nodes[0].start()
        await until(fabric.fleet.membership.has_all_reports)
        assert nodes[0].memory == {}

    assert first.status_code == 200
    assert (first.json()["deleted"], first.json()["unreachable"]) == (False, ["node-a"])


async def test_fork_epoch_is_above_unreported_owner():
    nodes = two_nodes()
    nodes[1].memory["default", "mira"] = Memory("default", "mira", epoch=1, text="y" * 300)
    nodes[1].blocks |= block_names("y" * 300)
    async with rig(nodes=nodes, scale=8.0, started=False) as fabric:
        await nodes[0].stop()
        await until(fabric.fleet.membership.is_settled)
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        path = "/v1/agents/mira/fork"
        forked = await fabric.http().post(path, json={"as": "alice", "to": "node-b"})

    assert forked.status_code == 200, forked.text
    assert forked.json()["epoch"] > 1_024


@pytest.mark.parametrize("how", ["served", "moved"])
@pytest.mark.parametrize("epochs", [(3, 2), (3, 2, 1), (3, 2, 2)])
async def test_owner_epoch_skips_above_unreported_later_owner(how, epochs):
    """Otherwise the owner's later turns would be fenced when the other owner returns.

    An older claim that it has superseded does not rule out a later one.
    """
    nodes = [FakeNode("node-a"), FakeNode("node-b"), FakeNode("node-c")]
    for node, epoch in zip(nodes, epochs, strict=False):
        node.memory["default", "alice"] = Memory("default", "alice", epoch=epoch, text="y" * 300)
        node.memory["default", "alice"].revision = 3 if node.name == "node-b" else 1
        node.blocks |= block_names("y" * 300)
    async with rig(nodes=nodes, scale=8.0, started=False) as fabric:
        await nodes[0].stop()
        await until(fabric.fleet.membership.is_settled)
        await until(lambda: not fabric.fleet.directory.undecided_agents())
        if how == "moved":
            moved = await migrate(fabric, "node-c")
            assert moved.json()["epoch"] > 1_024, moved.text
        turns = [await fabric.chat("hi", agent="alice") for _ in range(2)]
        await nodes[0].start()
        await until(fabric.fleet.membership.has_all_reports)
        turns.append(await fabric.chat("hi", agent="alice"))

    served = "node-b" if how == "served" else "node-c"
    assert {turn.headers["x-macfabric-node"] for turn in turns} == {served}
    epochs = {int(turn.headers["x-macfabric-epoch"]) for turn in turns}
    assert len(epochs) == 1
    assert min(epochs) > 1_024


async def test_owner_epoch_skips_above_replica_of_later_owner():
    """After two restarts, the second router's gap may be smaller than the first one's."""
    nodes = [FakeNode("node-a"), FakeNode("node-b"), FakeNode("node-c")]
    for node, epoch in zip(nodes, (9_000_000, 9_000_000, 1), strict=True):
        memory = Memory("default", "alice", epoch=epoch, text="y" * 300)
        node.memory["default", "alice"] = memory
    nodes[1].memory[KEY].state, nodes[1].memory[KEY].owner = OwnerState.REPLICA, "node-a"
    settings = RouterSettings(nodes_expected=3)
    async with rig(nodes=nodes, settings=settings, started=False) as fabric:
        replica, later = fabric.listed.pop("node-b"), fabric.listed.pop("node-a")
        await until(fabric.fleet.ready)
        first = await fabric.chat("hi", agent="alice")
        fabric.listed["node-b"] = replica
        await until(lambda: fabric.fleet.directory.highest(KEY) == 9_000_000)
        second = await fabric.chat("hi", agent="alice")
        fabric.listed["node-a"] = later
        await until(fabric.fleet.discovery.has_all_reports)
        third = await fabric.chat("hi", agent="alice")

    epochs = [int(turn.headers["x-macfabric-epoch"]) for turn in (first, second, third)]
    assert 1_024 < epochs[0] < 9_000_000 < epochs[1] == epochs[2]
    assert {turn.headers["x-macfabric-node"] for turn in (first, second, third)} == {"node-c"}


def test_epoch_map_evicts_only_within_a_tenant():
    epochs = EpochMap(agents_max=10)
    epochs.note(("calm", "alice"), 7)
    for i in range(100):
        epochs.note(("loud", f"x{i}"), i)

    assert epochs.last(("calm", "alice")) == 7
    assert epochs.last(("loud", "x99")) == 99
    assert epochs.last(("loud", "x89")) == 0
    epochs.note(("calm", "alice"), 5)
    assert epochs.last(("calm", "alice")) == 7


def test_issued_epochs_are_bounded_per_tenant(monkeypatch):
    monkeypatch.setattr("router.fleet.directory.EPOCHS_ISSUED_MAX", 4)
    directory = Directory()
    for note in (directory.issue, directory.promise):
        note(("calm", "alice"), 7)
        for i in range(9):
            note(("loud", f"x{i}"), 3)

    assert directory.next_epoch(("calm", "alice")) == 8
    assert directory.next_epoch(("loud", "x0")) == 0
