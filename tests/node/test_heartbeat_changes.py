"""Changes that a node sends in heartbeats, applied as a router applies them."""

import random
from dataclasses import replace

import pytest

from fabric.codec import pack, unpack
from fabric.control.calls import encode_call, encode_reply
from fabric.control.change_calls import (
    COLUMNS,
    AgentChanges,
    AgentRow,
    DescribeChanges,
    ListChanges,
    ViewChanges,
    from_row,
    to_row,
)
from fabric.control.node_calls import AgentSketch, AgentView, LastMatch, TierBytes
from fabric.errors import RejectedError
from fabric.ids import AgentId, Fingerprint, NodeName, TenantId
from fabric.net.links import Address, LinkKind, PeerNode
from fabric.record.manifest import AgentSettings, OwnerState
from node.agents.agent_listing import list_changes
from node.agents.agent_table import AgentTable
from node.limits import VIEWS_KEPT_MAX
from node.net.link_table import LinkTable
from node.view_history import ViewHistory
from tests.router.placement.snapshots import view
from tests.support.clocks import ManualClock

NODE = NodeName("node-0004")
KEY = (TenantId("default"), AgentId("agent-000123"))


class Node:
    """A node's view, links and agents, changed at random."""

    def __init__(self, seed=0, peers=3):
        self.draw = random.Random(seed)
        self.clock = ManualClock()
        self.links = LinkTable(self.clock)
        self.history = ViewHistory()
        self.view = view(NODE, http_url="http://10.0.0.4:8100")
        self.peers = {}
        for number in range(peers):
            self.meet(number)

    def meet(self, number):
        kinds = (LinkKind.ETHERNET, LinkKind.THUNDERBOLT)
        addresses = tuple(Address(f"10.0.{number}.{at}", 7, kind) for at, kind in enumerate(kinds))
        self.peers[number] = PeerNode(NodeName(f"node-{number:04}"), 1, addresses)
        self.links.set_peers(tuple(self.peers.values()))

    def answer(self, call):
        known_links = call.links if call.view and call.incarnation == self.view.incarnation else 0
        changes = self.history.changes(call, self.view, self.links.changes_after(known_links))
        return unpack(ViewChanges, pack(changes))

    def change(self):
        draw = self.draw
        self.clock.now_s += draw.random()
        for peer in self.peers.values():
            for address in peer.addresses:
                if draw.random() < 0.3:
                    self.links.record_answer(
                        peer.name, address, draw.uniform(0.1, 1.0), "en0", None
                    )
                elif draw.random() < 0.1:
                    self.links.failed(peer.name, address)
        if draw.random() < 0.5:
            warning = draw.choice([None, "plain"])
            self.view = replace(self.view, changes=draw.randrange(9), template_warning=warning)
        if draw.random() < 0.1:
            self.meet(draw.randrange(9))
        if draw.random() < 0.1 and self.peers:
            del self.peers[draw.choice(sorted(self.peers))]
            self.links.set_peers(tuple(self.peers.values()))
        if draw.random() < 0.05:  # the node restarts
            self.view = replace(self.view, incarnation=self.view.incarnation + 1)
            self.history = ViewHistory()


class Router:
    """A router's copy of the view."""

    def __init__(self):
        self.view, self.known = None, (0, 0)

    def call(self):
        incarnation = self.view.incarnation if self.view else 0
        return DescribeChanges(incarnation, *self.known) if self.view else DescribeChanges()

    def apply(self, changes, base):
        same = base is not None and base.incarnation == changes.incarnation
        self.view = changes.apply_to(base if same else None)
        self.known = changes.view, changes.links


def comparable(link):
    return (link.peer, link.host, link.kind, link.device, link.reachable, link.problem)


@pytest.mark.parametrize("seed", range(20))
def test_routers_follow_the_view_despite_lost_answers(seed):
    node, routers = Node(seed), [Router(), Router(), Router()]
    for _ in range(60):
        for _ in range(node.draw.choice([1, 1, VIEWS_KEPT_MAX])):
            node.change()
            if node.draw.random() < 0.3:
                node.answer(DescribeChanges())
        for router in routers:
            base, changes = router.view, node.answer(router.call())
            if node.draw.random() < 0.7:
                router.apply(changes, base)
                assert replace(router.view, links=()) == node.view
                assert [comparable(x) for x in router.view.links] == [
                    comparable(x) for x in node.links.views()
                ]


def test_unchanged_view_stays_the_same_object():
    node, router = Node(peers=16), Router()
    router.apply(node.answer(router.call()), None)
    before = router.view
    node.clock.now_s += 5
    router.apply(node.answer(router.call()), before)

    assert router.view is before
    assert len(before.links) == 32


def test_unchanged_node_sends_at_most_300_bytes_with_any_peers():
    for peers in (0, 3, 64):
        node, router = Node(peers=peers), Router()
        node.view = replace(node.view, scrubbed_bytes=10**12)
        router.apply(node.answer(router.call()), None)
        node.clock.now_s += 1.0
        node.view = replace(node.view, scrubbed_bytes=10**12 + 10**9)
        for peer in node.peers.values():
            node.links.record_answer(peer.name, peer.addresses[0], 0.000_3, "en0", None)
        router.apply(node.answer(router.call()), router.view)
        node.clock.now_s += 100.0  # one link is old enough to be sent again
        for peer in node.peers.values():
            node.links.record_answer(peer.name, peer.addresses[0], 0.000_35, "en0", None)
        raw = encode_reply(node.answer(router.call()))
        assert len(raw) + len(encode_call(router.call())) <= 300


def agent_view(**changes):
    return replace(
        AgentView(
            *KEY,
            group=None,
            node=NODE,
            state=OwnerState.OWNED,
            epoch=3,
            revision=17,
            tokens=12_800,
            blocks=51,
            bytes=TierBytes(471_859_200, 471_859_200),
            tiers=("hot", "disk"),
            busy=False,
            created_s=1_764_339_000.123,
            used_s=1_764_339_200.5,
            last_match=LastMatch("extension", 12_700, 12_810, "continues the agent's memory"),
            durable=True,
            tail="0123456789abcdef",
        ),
        **changes,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group": "team", "last_match": None, "exact_tokens": 5},
        {"settings": AgentSettings(), "tiers": ()},
    ],
)
def test_agent_rows_round_trip(changes):
    row = unpack(AgentRow, pack(AgentRow.of(AgentSketch(agent_view(**changes), (1, 2), 7, (3, 4)))))
    assert row.to_agent_sketch() == AgentSketch(agent_view(**changes), (1, 2), 7, (3, 4))


def test_malformed_rows_are_refused():
    raw = to_row(agent_view())
    assert from_row(AgentView, raw) == agent_view()
    assert len(raw) < len(AgentView.__slots__), "defaults are omitted"
    for wrong in (raw[:5], [*raw, *[None] * 9], {"tenant": "default"}, [*raw[:-1], 7], "row"):
        with pytest.raises(RejectedError):
            from_row(AgentView, wrong)


class Listed:
    """A node's agents, and a router's list of them."""

    def __init__(self):
        self.table = AgentTable(NODE, Fingerprint(b"f" * 32), ManualClock())
        self.since, self.sketches = 0, {}

    def sketch(self, agent, pieces):
        key = (KEY[0], AgentId(agent))
        agent_entry = self.table.get(key) or self.table.create(*key, None, 1)
        agent_entry.manifest = replace(agent_entry.manifest, sketch=tuple(pieces))
        self.table.put(agent_entry)

    def fetch_changes(self):
        return list_changes(NODE, 1, self.table, ListChanges(1, self.since, COLUMNS))

    def apply(self, found):
        for row in (each.to_agent_sketch() for each in found.agents):
            pieces = row.sketch
            if row.kept is not None:
                count, last = row.kept
                before = self.sketches[row.view.agent]
                assert before[count - 1] == last
                pieces = (*before[:count], *pieces)
            self.sketches[row.view.agent] = pieces
        self.since = found.changes


def chained(draw, pieces=(), more=3):
    return (*pieces, *(draw.getrandbits(63) for _ in range(more)))


@pytest.mark.parametrize("seed", range(10))
def test_change_lists_reproduce_every_sketch(seed):
    draw, listed, real = random.Random(seed), Listed(), {}
    for _ in range(120):
        agent = f"agent-{draw.randrange(4)}"
        before = real.get(agent, ())
        if draw.random() < 0.2:  # an edit: the beginning stays
            before = before[: draw.randrange(len(before) + 1)]
        real[agent] = chained(draw, before, draw.randrange(5))
        listed.sketch(agent, real[agent])
        if draw.random() < 0.3:
            found = listed.fetch_changes()
            if draw.random() < 0.8:
                listed.apply(found)
                assert listed.sketches == real


@pytest.mark.parametrize("pieces_count", [0, 2, 7])
def test_sketch_of_a_change_that_is_still_being_stored_is_listed_whole(pieces_count):
    draw, listed = random.Random(2), Listed()
    sketch = chained(draw, more=5)
    listed.sketch(KEY[1], sketch)
    listed.apply(listed.fetch_changes())
    listed.table.put(agent := listed.table.get(KEY))
    cut = sketch[:pieces_count] if pieces_count < 5 else chained(draw, more=pieces_count)
    agent.manifest = replace(agent.manifest, sketch=cut)

    [row] = listed.fetch_changes().agents
    assert row.to_agent_sketch().kept is None
    assert row.to_agent_sketch().sketch == cut


@pytest.mark.parametrize("pieces_count", [10, 1_000, 8_000])
def test_turn_adds_at_most_400_bytes_at_any_conversation_length(pieces_count):
    draw, listed = random.Random(1), Listed()
    sketch = chained(draw, more=pieces_count)
    listed.sketch(KEY[1], sketch)
    listed.apply(listed.fetch_changes())
    node, router = Node(), Router()
    router.apply(node.answer(router.call()), None)
    idle = len(encode_reply(node.answer(router.call())))

    sketch = chained(draw, sketch, 3)
    listed.sketch(KEY[1], sketch)
    found = listed.fetch_changes()
    [row] = found.agents
    assert row.kept == (pieces_count, sketch[pieces_count - 1])
    assert row.sketch == sketch[pieces_count:]
    full = AgentRow.of(AgentSketch(agent_view(), row.sketch, 2**63, row.kept))
    reply = AgentChanges(1_764_339_000, found.changes, found.since, (full,))
    node.view = replace(
        node.view,
        changes=100_001,
        tokens=10_000_000,
        bytes=TierBytes(10**10, 10**11),
        free=TierBytes(10**10, 10**11),
        prefill_tokens_per_s=812.5,
        decode_tokens_per_s=41.25,
    )
    heartbeat_bytes = len(encode_reply(node.answer(router.call()))) - idle
    assert heartbeat_bytes + len(encode_reply(reply)) <= 400


def test_unknown_columns_are_refused_with_their_own_code():
    listed = Listed()
    with pytest.raises(RejectedError) as caught:
        list_changes(NODE, 1, listed.table, ListChanges(1, 0, COLUMNS + 1))
    assert caught.value.code == "other_columns"
