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
SAID = "word " * 8_000  # 10 s of prefill on a fake node
NOW_S = 1_790_000_000
A, B, C = (NodeName(f"node-{letter}") for letter in "abc")


class Shelf:
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


def shelf(*names, configured=0, drained=()):
    nodes = tuple(SeenNode(name, NOW_S, name in drained) for name in names)
    return Shelf(NodeRoster(configured, nodes))


def made_nodes(names="ab"):
    nodes = [FakeNode(f"node-{letter}") for letter in names]
    sketch = chat_prompt([Message(MessageRole.USER, (SAID,))]).sketch
    nodes[1].memory[KEY] = Memory(*KEY, epoch=4, text=f"<user>{SAID}", sketch=sketch)
    return nodes


@asynccontextmanager
async def router_over(nodes, store, *, listed=None, count=0, names=(), **options):
    """Run a router that finds only the nodes in `listed`, by default all."""
    settings = RouterSettings(nodes_expected=count)
    expected = ExpectedNodes(count, names) if names else None
    options |= {"started": False, "tended": False, "roster_store": store, "expected": expected}
    async with rig(nodes=nodes, settings=settings, **options) as made:
        made.late = {
            node.name: made.listed.pop(node.name)
            for node in nodes
            if listed is not None and node.name not in listed
        }
        made.fleet.clock.wall_s = lambda: NOW_S + 5.0
        made.keeper = made.services.roster_keeper
        made.services.erasure_exchange._heard |= {A, B}  # else greetings wait for each other
        await made.fleet.membership.discover()
        await made.fleet.membership.refresh()
        yield made


def missing(made):
    return str(made.fleet.discovery.missing)


async def test_a_turn_waits_for_a_node_that_only_the_stored_roster_names(tmp_path):
    store = RosterFile(tmp_path / "roster.json")
    async with rig(nodes=made_nodes(), roster_store=store):
        await until(lambda: len(store.read().nodes) == 2)
    async with rig(nodes=made_nodes(), roster_store=store, started=False) as made:
        late = made.listed.pop("node-b")
        await until(made.fleet.ready)
        health = (await made.http().get("/healthz")).json()
        asking = asyncio.create_task(made.chat(SAID, "noted", "and?", agent="alice"))
        await asyncio.sleep(0.3)
        was_answered = asking.done()
        made.listed["node-b"] = late
        answer = await asking

    assert (health["status"], health["missing"], health["unmet"]) == ("partial", ["node-b"], 1)
    assert not was_answered
    assert answer.headers["x-macfabric-node"] == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4", "it was not begun anew"


@pytest.mark.parametrize("count", [0, 1])
async def test_without_a_roster_or_a_number_epochs_skip_those_of_unknown_nodes(count):
    async with rig(
        "a", settings=RouterSettings(nodes_expected=count), roster_store=Shelf()
    ) as made:
        answer = await made.chat("hi", agent="alice")

    assert (int(answer.headers["x-macfabric-epoch"]) > EPOCH_GAP) is (count == 0)


async def test_the_roster_is_written_only_when_it_changes():
    store = Shelf()
    async with router_over(made_nodes(), store) as made:
        for _ in range(3):
            await made.keeper.round()
        first = store.writes
        nodes = [replace(n, seen_s=n.seen_s - int(ROSTER_RENEW_S)) for n in store.roster.nodes]
        made.keeper._stored = replace(store.roster, nodes=tuple(nodes))
        await made.keeper.round()

    assert (first, store.writes, store.names) == (1, 2, [A, B])


async def test_a_node_that_has_not_reported_is_not_stored():
    store, nodes = Shelf(), made_nodes()
    nodes[1].is_loading = True
    async with router_over(nodes, store) as made:
        await made.keeper.round()

    assert store.names == [A]


async def test_a_drained_node_is_not_awaited_and_is_again_after_it_takes_agents():
    store, nodes = shelf(A, B, configured=2), made_nodes()
    nodes[0].view_changes = {"state": "draining"}
    nodes[1].view_changes = {"state": "draining"}  # but Alice is still there
    async with router_over(nodes, store, count=2) as made:
        await made.keeper.round()
    drained = [node.is_drained for node in store.roster.nodes]
    async with router_over(made_nodes(), store, listed=[B], count=2) as made:
        without_a = missing(made)
    async with router_over(made_nodes(), store, listed=[A], count=2) as made:
        without_b = missing(made)
        await made.keeper.round()

    assert drained == [True, False]
    assert (without_a, without_b) == ("", "node-b")
    assert not any(node.is_drained for node in store.roster.nodes)


async def test_names_of_the_configuration_replace_the_roster():
    store = shelf(A, B, C)
    async with router_over(made_nodes(), store, listed=[A], names=(A, B)) as made:
        awaited = missing(made)
        await made.keeper.round()

    assert awaited == "node-b"
    assert (store.names, store.roster.configured) == ([A, B], 2)


@pytest.mark.parametrize(
    ("count", "awaited"),
    [
        (0, "node-b, node-c"),
        (2, "1 node without a known name"),  # one of them was removed, but which?
        (3, "node-b, node-c"),
        (4, "node-b, node-c, 1 node without a known name"),
    ],
)
async def test_a_number_of_nodes_is_compared_with_the_one_of_the_last_start(count, awaited):
    store = shelf(A, B, C, configured=3)
    async with router_over(made_nodes(), store, listed=[A], count=count) as made:
        assert missing(made) == awaited


async def test_after_the_time_to_join_as_many_nodes_as_configured_are_the_roster():
    """The missing node was renamed, or its Mac was given away."""
    store = shelf(A, C, configured=2)
    async with router_over(made_nodes(), store, count=2) as made:
        await made.keeper.round()
        early = store.names
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        await made.keeper.round()
        awaited = missing(made)

    assert early == [A, B, C]
    assert (store.names, awaited) == ([A, B], "")


async def test_a_fabric_with_fewer_nodes_forgets_the_others_when_all_have_joined():
    store = shelf(A, B, C, configured=3)
    async with router_over(made_nodes(), store, count=2) as made:
        await made.keeper.round()
        early = store.roster.configured
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        await made.keeper.round()

    assert early == 3, "a start before that still knows that there were more"
    assert (store.names, store.roster.configured) == ([A, B], 2)


async def test_a_missing_node_is_kept_while_too_few_have_joined():
    store = shelf(A, B, configured=2)
    async with router_over(made_nodes(), store, listed=[A], count=2) as made:
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        await made.keeper.round()

    assert store.names == [A, B]


async def test_a_node_that_others_outlived_by_weeks_is_not_awaited():
    early_s = NOW_S - int(NODE_REMEMBERED_S) - 1
    nodes = SeenNode(A, NOW_S), SeenNode(B, NOW_S - 9), SeenNode(C, early_s)
    store = Shelf(NodeRoster(0, nodes))
    async with router_over(made_nodes(), store, listed=[A]) as made:
        awaited = missing(made)
        made.fleet.clock.wall_s = lambda: 5.0  # a Mac whose battery was empty
        await made.keeper.round()

    assert awaited == "node-b"
    assert store.names == [A, B]


async def test_a_file_that_cannot_be_read_or_written_costs_the_memory_only(tmp_path):
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
async def test_a_later_router_uses_epochs_above_every_earlier_one(is_erased, monkeypatch):
    """Every router finds another node only, and draws a smaller number than the one before."""
    leaps = iter([EPOCH_GAP + (1 << EPOCH_GAP_BITS) - 1, EPOCH_GAP + 9, EPOCH_GAP])
    monkeypatch.setattr("router.fleet.fleet.fresh_epoch_gap", lambda: next(leaps))
    store, epochs = Shelf(), []
    for name in (A, B, C):
        nodes = [FakeNode(name)]
        async with rig(
            nodes=nodes, settings=RouterSettings(nodes_expected=3), roster_store=store
        ) as made:
            made.fleet.discovery._gathered_s = 0.0
            if is_erased and name == A:
                monkeypatch.setattr("router.fleet.fleet.ERASURE_EPOCHS", 1)
                await made.http().delete("/v1/agents/alice")
                known = list(made.services.erasure_exchange.known)
            elif is_erased:
                made.services.erasure_exchange.known.merge(known)
            answer = await made.chat("hi", agent="alice")
        epochs.append(int(answer.headers["x-macfabric-epoch"]))

    assert epochs == sorted(epochs)
    assert store.roster.lives == 3


async def test_an_erasure_is_above_what_any_router_so_far_may_have_given_out(monkeypatch):
    monkeypatch.setattr("router.fleet.fleet.ERASURE_EPOCHS", 1)
    store = Shelf(NodeRoster(2, (), lives=40))
    async with router_over(made_nodes(), store, listed=[A], count=2) as made:
        highest = made.fleet.begin_epoch(KEY)
        erased = made.fleet.erasure_epoch(KEY)

    assert highest >= 41 << EPOCH_GAP_BITS
    assert erased > highest + (1 << EPOCH_GAP_BITS) - EPOCH_GAP
