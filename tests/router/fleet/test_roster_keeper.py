"""A router stores the nodes that reported; the next one waits for them without configuration."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fabric.ids import NodeName
from fabric.settings import RouterSettings
from fabric.turn.messages import Message, MessageRole
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.node_roster import NodeRoster, RosterFile, SeenNode
from router.fleet.roster_keeper import ROSTER_RENEW_S
from router.limits import EPOCH_GAP, EPOCH_GAP_BITS, NODE_REMEMBERED_S, ROSTER_BYTES_MAX
from router.prompt import chat_prompt
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
KEY = ("default", "alice")
PROMPT = "word " * 8_000  # 10 s of prefill on a fake node
NOW_S = 1_790_000_000
A, B, C = (NodeName(f"node-{letter}") for letter in "abc")


class MemoryStore:
    """A roster store in memory."""

    def __init__(self, roster=None):
        self.roster = roster or NodeRoster()
        self.writes = 0

    def read(self):
        return self.roster

    async def write(self, roster):
        self.roster, self.writes = roster, self.writes + 1
        return True

    @property
    def names(self):
        return [node.name for node in self.roster.nodes]


def stored(*names, configured=0, drained=()):
    nodes = tuple(SeenNode(name, NOW_S, name in drained) for name in names)
    return MemoryStore(NodeRoster(configured, nodes))


def two_nodes(names="ab"):
    nodes = [FakeNode(f"node-{letter}") for letter in names]
    sketch = chat_prompt([Message(MessageRole.USER, (PROMPT,))]).sketch
    nodes[1].memory[KEY] = Memory(*KEY, epoch=4, text=f"<user>{PROMPT}", sketch=sketch)
    return nodes


@asynccontextmanager
async def router_over(nodes, store, *, listed=None, count=0, names=(), **options):
    """Run a router that finds only the nodes in `listed`, by default all."""
    settings = RouterSettings(nodes_expected=count)
    expected = ExpectedNodes(count, names) if names else None
    options |= {"started": False, "tended": False, "roster_store": store, "expected": expected}
    async with rig(nodes=nodes, settings=settings, **options) as fabric:
        fabric.late = {
            node.name: fabric.listed.pop(node.name)
            for node in nodes
            if listed is not None and node.name not in listed
        }
        fabric.fleet.clock.wall_s = lambda: NOW_S + 5.0
        fabric.keeper = fabric.services.roster_keeper
        # Otherwise handshakes wait for each other.
        fabric.services.erasure_exchange._reporters |= {A, B}
        await fabric.fleet.membership.discover()
        await fabric.fleet.membership.refresh()
        yield fabric


def missing_nodes(fabric):
    return str(fabric.fleet.discovery.missing)


async def test_turn_waits_for_node_known_only_from_stored_roster(tmp_path):
    store = RosterFile(tmp_path / "roster.json")
    async with rig(nodes=two_nodes(), roster_store=store):
        await until(lambda: len(store.read().nodes) == 2)
    async with rig(nodes=two_nodes(), roster_store=store, started=False) as fabric:
        late = fabric.listed.pop("node-b")
        await until(fabric.fleet.ready)
        health = (await fabric.http().get("/healthz")).json()
        asking = asyncio.create_task(fabric.chat(PROMPT, "noted", "and?", agent="alice"))
        await asyncio.sleep(0.3)
        was_answered = asking.done()
        fabric.listed["node-b"] = late
        answer = await asking

    assert (health["status"], health["missing"], health["unmet"]) == ("partial", ["node-b"], 1)
    assert not was_answered
    assert answer.headers["x-macfabric-node"] == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4", "the agent was not started again"


@pytest.mark.parametrize("count", [0, 1])
async def test_epochs_skip_ahead_without_roster_or_node_count(count):
    async with rig(
        "a", settings=RouterSettings(nodes_expected=count), roster_store=MemoryStore()
    ) as fabric:
        answer = await fabric.chat("hi", agent="alice")

    assert (int(answer.headers["x-macfabric-epoch"]) > EPOCH_GAP) is (count == 0)


async def test_roster_is_written_only_on_change():
    store = MemoryStore()
    async with router_over(two_nodes(), store) as fabric:
        for _ in range(3):
            await fabric.keeper.round()
        first = store.writes
        nodes = [replace(n, seen_s=n.seen_s - int(ROSTER_RENEW_S)) for n in store.roster.nodes]
        fabric.keeper._stored = replace(store.roster, nodes=tuple(nodes))
        await fabric.keeper.round()

    assert (first, store.writes, store.names) == (1, 2, [A, B])


async def test_unreported_node_is_not_stored():
    store, nodes = MemoryStore(), two_nodes()
    nodes[1].is_loading = True
    async with router_over(nodes, store) as fabric:
        await fabric.keeper.round()

    assert store.names == [A]


async def test_drained_node_is_awaited_again_only_after_it_takes_agents():
    store, nodes = stored(A, B, configured=2), two_nodes()
    nodes[0].view_changes = {"state": "draining"}
    nodes[1].view_changes = {"state": "draining"}  # but Alice is still there
    async with router_over(nodes, store, count=2) as fabric:
        await fabric.keeper.round()
    drained = [node.is_drained for node in store.roster.nodes]
    async with router_over(two_nodes(), store, listed=[B], count=2) as fabric:
        without_a = missing_nodes(fabric)
    async with router_over(two_nodes(), store, listed=[A], count=2) as fabric:
        without_b = missing_nodes(fabric)
        await fabric.keeper.round()

    assert drained == [True, False]
    assert (without_a, without_b) == ("", "node-b")
    assert not any(node.is_drained for node in store.roster.nodes)


async def test_configured_names_replace_roster():
    store = stored(A, B, C)
    async with router_over(two_nodes(), store, listed=[A], names=(A, B)) as fabric:
        awaited = missing_nodes(fabric)
        await fabric.keeper.round()

    assert awaited == "node-b"
    assert (store.names, store.roster.configured) == ([A, B], 2)


@pytest.mark.parametrize(
    ("count", "awaited"),
    [
        (0, "node-b, node-c"),
        (2, "1 node without a known name"),  # one of two was removed, but which?
        (3, "node-b, node-c"),
        (4, "node-b, node-c, 1 node without a known name"),
    ],
)
async def test_awaited_nodes_depend_on_node_count_of_last_start(count, awaited):
    store = stored(A, B, C, configured=3)
    async with router_over(two_nodes(), store, listed=[A], count=count) as fabric:
        assert missing_nodes(fabric) == awaited


async def test_roster_is_trimmed_to_configured_count_after_gathering_time():
    """The missing node was renamed, or its Mac was given away."""
    store = stored(A, C, configured=2)
    async with router_over(two_nodes(), store, count=2) as fabric:
        await fabric.keeper.round()
        early = store.names
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        await fabric.keeper.round()
        awaited = missing_nodes(fabric)

    assert early == [A, B, C]
    assert (store.names, awaited) == ([A, B], "")


async def test_smaller_fabric_forgets_extra_nodes_once_all_have_joined():
    store = stored(A, B, C, configured=3)
    async with router_over(two_nodes(), store, count=2) as fabric:
        await fabric.keeper.round()
        early = store.roster.configured
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        await fabric.keeper.round()

    assert early == 3, "until then, a restart still expects three nodes"
    assert (store.names, store.roster.configured) == ([A, B], 2)


async def test_missing_node_is_kept_while_too_few_have_joined():
    store = stored(A, B, configured=2)
    async with router_over(two_nodes(), store, listed=[A], count=2) as fabric:
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        await fabric.keeper.round()

    assert store.names == [A, B]


async def test_node_unseen_for_weeks_is_not_awaited():
    early_s = NOW_S - int(NODE_REMEMBERED_S) - 1
    nodes = SeenNode(A, NOW_S), SeenNode(B, NOW_S - 9), SeenNode(C, early_s)
    store = MemoryStore(NodeRoster(0, nodes))
    async with router_over(two_nodes(), store, listed=[A]) as fabric:
        awaited = missing_nodes(fabric)
        fabric.fleet.clock.wall_s = lambda: 5.0  # a clock that was reset
        await fabric.keeper.round()

    assert awaited == "node-b"
    assert store.names == [A, B]


async def test_unreadable_or_unwritable_roster_file_is_ignored(tmp_path):
    path = tmp_path / "roster.json"
    file = RosterFile(path)
    assert file.read() == NodeRoster()
    assert await file.write(NodeRoster(2, (SeenNode(A, 7),)))
    written = path.read_text()
    assert file.read() == NodeRoster(2, (SeenNode(A, 7),))
    bad = ["", "[]", written[:-4], written.replace("1", "9", 1), written.replace("node-a", "../x")]
    for text in [*bad, written + " " * ROSTER_BYTES_MAX]:
        path.write_text(text)
        assert file.read() == NodeRoster(), text
    assert not await RosterFile(tmp_path / "none" / "roster.json").write(NodeRoster())


@pytest.mark.parametrize("is_erased", [False, True])
async def test_later_router_uses_epochs_above_all_earlier_ones(is_erased, monkeypatch):
    """Every router finds one other node only, and draws a smaller gap than the one before."""
    leaps = iter([EPOCH_GAP + (1 << EPOCH_GAP_BITS) - 1, EPOCH_GAP + 9, EPOCH_GAP])
    monkeypatch.setattr("router.fleet.fleet.fresh_epoch_gap", lambda: next(leaps))
    store, epochs = MemoryStore(), []
    for name in (A, B, C):
        nodes = [FakeNode(name)]
        async with rig(
            nodes=nodes, settings=RouterSettings(nodes_expected=3), roster_store=store
        ) as fabric:
            fabric.fleet.discovery._gathered_s = 0.0
            if is_erased and name == A:
                monkeypatch.setattr("router.fleet.fleet.ERASURE_EPOCHS", 1)
                await fabric.http().delete("/v1/agents/alice")
                tombstones = list(fabric.services.erasure_exchange.known)
            elif is_erased:
                fabric.services.erasure_exchange.known.merge(tombstones)
            answer = await fabric.chat("hi", agent="alice")
        epochs.append(int(answer.headers["x-macfabric-epoch"]))

    assert epochs == sorted(epochs)
    assert store.roster.lives == 3


async def test_erasure_epoch_is_above_all_epochs_of_earlier_routers(monkeypatch):
    monkeypatch.setattr("router.fleet.fleet.ERASURE_EPOCHS", 1)
    store = MemoryStore(NodeRoster(2, (), lives=40))
    async with router_over(two_nodes(), store, listed=[A], count=2) as fabric:
        highest = fabric.fleet.begin_epoch(KEY)
        erased = fabric.fleet.erasure_epoch(KEY)

    assert highest >= 41 << EPOCH_GAP_BITS
    assert erased > highest + (1 << EPOCH_GAP_BITS) - EPOCH_GAP
