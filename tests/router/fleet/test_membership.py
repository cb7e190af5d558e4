import asyncio
from dataclasses import replace

import pytest

from fabric.control.change_calls import (
    AgentChanges,
    AgentRow,
    DescribeChanges,
    ListChanges,
    ViewChanges,
)
from fabric.control.node_calls import ASLEEP, READY, AgentList, Describe, ListAgents
from fabric.errors import FabricError, RejectedError, RetryLaterError
from fabric.limits import HEARTBEAT_S
from node.net.link_table import LinkChanges
from node.view_history import ViewHistory
from router.fleet.membership import LeaseState, Membership
from router.fleet.node_client import NodeLostError
from router.limits import LEASE_S, SUSPECT_S, WHOLE_LIST_S
from tests.router.fake_node import FakeNode
from tests.router.rig import until
from tests.support.clocks import ManualClock

pytestmark = pytest.mark.anyio


class Link:
    """Answers from a fake node without any transport."""

    def __init__(self, name, node, clock):
        self.name, self.node, self.clock = name, node, clock
        self.http_url = ""
        self.call_names, self.since = [], []
        self.error = None
        self.takes_s = 0.0
        self.block = None

    async def call(self, message, kind, timeout_s=10.0):
        if isinstance(message, DescribeChanges):  # as a node of an earlier version
            text = "unknown control call"
            raise RejectedError(text, code="unknown_call")
        self.call_names.append(type(message).__name__)
        if isinstance(message, ListAgents):
            self.since.append(message.since)
        if self.block and isinstance(message, self.block[0]):
            await self.block[1].wait()
        self.clock.now_s += self.takes_s
        if self.error:
            raise self.error
        return self.node.view() if isinstance(message, Describe) else self.node._list()


class Observer:
    def __init__(self):
        self.lists, self.restarts, self.doubted = [], [], set()

    async def on_list(self, agents: AgentList, requested_s):
        self.lists.append((agents.node, agents.incarnation, agents.changes, requested_s))

    def needs_whole_list(self, node):
        return node in self.doubted

    def on_restart(self, node):
        self.restarts.append(node)


class World:
    def __init__(self, *names):
        self.clock, self.observer = ManualClock(), Observer()
        self.nodes = {name: FakeNode(name) for name in names}
        self.links = {}
        self.membership = Membership(self.roster, self.connect, self.clock, self.observer)

    async def roster(self):
        return self.nodes

    def connect(self, name, transport, is_lost):
        self.links[name] = Link(name, transport, self.clock)
        self.links[name].is_lost = is_lost
        return self.links[name]

    def health(self, name="a"):
        return self.membership.health(name)

    async def heartbeat(self, name="a"):
        await self.membership.heartbeat(self.membership.find(name))


async def joined_world(*names):
    world = World(*(names or ("a",)))
    await world.membership.discover()
    return world


async def test_lease_expires_by_clock():
    world = await joined_world()
    await world.heartbeat()
    assert world.health() is LeaseState.ALIVE
    world.clock.now_s += SUSPECT_S - 0.01
    assert world.health() is LeaseState.ALIVE
    world.clock.now_s += 0.02
    assert world.health() is LeaseState.SUSPECT
    assert not world.links["a"].is_lost()
    world.clock.now_s += LEASE_S - SUSPECT_S
    assert world.health() is LeaseState.EXPIRED
    assert world.links["a"].is_lost()
    await world.heartbeat()
    assert world.health() is LeaseState.ALIVE


async def test_sleeping_node_loses_lease_and_regains_it_on_wake():
    world = await joined_world()
    await world.heartbeat()
    world.nodes["a"].is_asleep = True
    await world.heartbeat()
    member = world.membership.find("a")

    assert world.health() is LeaseState.EXPIRED
    assert world.membership.state_of(member) == ASLEEP
    assert world.membership.lease_left_s("a") == 0.0
    assert world.links["a"].is_lost()

    world.clock.now_s += 8 * 3600.0
    world.nodes["a"].is_asleep = False
    await world.heartbeat()
    assert world.health() is LeaseState.ALIVE
    assert world.membership.state_of(member) == READY


async def test_slow_heartbeat_reply_does_not_extend_lease():
    world = await joined_world()
    world.links["a"].takes_s = SUSPECT_S - 1
    await world.membership.heartbeat(world.membership.find("a"))
    world.clock.now_s += 1.01

    assert world.health() is LeaseState.SUSPECT


async def test_agents_are_listed_only_after_changes():
    world = await joined_world()
    for _ in range(3):
        await world.heartbeat()
    assert world.links["a"].call_names == ["Describe", "ListAgents", "Describe", "Describe"]
    world.nodes["a"].changes += 1
    await world.heartbeat()
    await world.heartbeat()

    assert world.links["a"].call_names[4:] == ["Describe", "ListAgents", "Describe"]
    assert [entry[:3] for entry in world.observer.lists] == [("a", 1, 0), ("a", 1, 1)]


async def test_restart_with_lower_counters_triggers_new_list():
    world = await joined_world()
    world.nodes["a"].incarnation, world.nodes["a"].changes = 9, 40
    await world.heartbeat()
    world.nodes["a"].incarnation, world.nodes["a"].changes = 3, 0
    await world.heartbeat()

    assert world.observer.restarts == ["a"]
    assert [entry[:3] for entry in world.observer.lists] == [("a", 9, 40), ("a", 3, 0)]
    assert world.membership.find("a").listed == (3, 0)


async def test_view_with_another_node_name_is_rejected():
    world = await joined_world()
    world.nodes["a"].view_changes = {"name": "b"}
    await world.heartbeat()

    assert world.membership.find("a").view is None


async def test_loading_node_keeps_lease_but_restarting_node_loses_it():
    world = await joined_world()
    loading = RetryLaterError("loading", code="loading")
    world.links["a"].error = loading
    for _ in range(20):
        world.clock.now_s += HEARTBEAT_S
        await world.heartbeat()
    assert world.health() is LeaseState.ALIVE
    assert not world.membership.is_settled()
    world.links["a"].error = None
    await world.heartbeat()
    assert world.membership.is_settled()
    world.links["a"].error = loading
    world.clock.now_s += LEASE_S
    await world.heartbeat()
    assert world.health() is LeaseState.EXPIRED


async def test_membership_settles_after_at_most_one_lease():
    world = await joined_world("a", "b")
    world.links["b"].error = NodeLostError("gone", "b")
    await world.membership.refresh()
    assert not world.membership.is_settled()
    world.clock.now_s += LEASE_S
    assert world.membership.is_settled()
    assert world.health("unheard-of") is LeaseState.EXPIRED


@pytest.mark.parametrize("slow", [Describe, ListAgents])
async def test_hung_node_or_long_list_delays_no_other_heartbeat(slow):
    world = await joined_world("a", "b")
    world.links["a"].block = (slow, asyncio.Event())
    running = asyncio.create_task(world.membership.run())
    await until(lambda: world.membership.find("b").view is not None)
    if slow is ListAgents:
        await until(lambda: world.membership.find("a").view is not None)
        world.membership.nudge("a")
        await until(lambda: world.links["a"].call_names.count("Describe") >= 2)
        assert world.links["a"].call_names.count("ListAgents") == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_unreadable_roster_does_not_stop_heartbeats():
    world = await joined_world()
    calls = []

    async def broken():
        calls.append(1)
        message = "Ray is away"
        raise FabricError(message)

    world.membership._roster = broken
    running = asyncio.create_task(world.membership.run())
    await until(lambda: calls and world.membership.find("a").view is not None)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_discovery_adds_new_nodes_and_keeps_known_ones():
    world = await joined_world()
    await world.heartbeat()
    world.nodes = {"b": FakeNode("b")}
    await world.membership.discover()

    assert [member.name for member in world.membership.members] == ["a", "b"]


async def test_outdated_heartbeat_reply_is_ignored():
    world = await joined_world()
    member = world.membership.find("a")
    gate = asyncio.Event()
    link = world.links["a"]
    old_view = replace(world.nodes["a"].view(), pid=111)

    async def late(_message, _kind, _timeout_s=10.0):
        await gate.wait()
        return old_view

    member.supports_changes = False
    fresh_call, link.call = link.call, late
    slow = asyncio.create_task(world.membership.heartbeat(member))
    await asyncio.sleep(0)
    link.call = fresh_call
    world.clock.now_s += 1
    await world.membership.heartbeat(member)
    gate.set()
    await slow

    assert member.view.pid == 1


async def test_stalled_router_expires_no_lease():
    world = await joined_world("a", "b")
    world.membership.heartbeat_s = 0.01
    world.links["b"].error = NodeLostError("gone", "b")
    running = asyncio.create_task(world.membership.run())
    await until(lambda: world.membership.find("a").view is not None)
    world.clock.now_s += 1_000.0
    after_sleep = (world.health("a"), world.health("b"), world.membership.expired_count)
    await until(lambda: world.links["b"].call_names.count("Describe") > 3)
    for _ in range(4):
        world.clock.now_s += LEASE_S / 4
        await asyncio.sleep(0.05)  # heartbeats continue: this silence is the node's own
    await until(lambda: world.membership.expired_count == 1)
    later = (world.health("a"), world.health("b"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert after_sleep == (LeaseState.ALIVE, LeaseState.ALIVE, 0)
    assert later == (LeaseState.ALIVE, LeaseState.EXPIRED)


async def test_whole_list_is_requested_when_observer_needs_it():
    world = await joined_world()
    world.observer.doubted.add("a")
    await world.heartbeat()
    await world.heartbeat()
    world.observer.doubted.clear()
    await world.heartbeat()

    assert world.links["a"].call_names == ["Describe", "ListAgents"] * 2 + ["Describe"]
    assert world.links["a"].since == [0, 0]


async def test_list_requests_ask_for_changes_only():
    world = await joined_world()
    world.nodes["a"].changes = 4
    await world.heartbeat()
    world.nodes["a"].changes = 9
    await world.heartbeat()
    world.clock.now_s += WHOLE_LIST_S + 1
    world.nodes["a"].changes = 12
    await world.heartbeat()

    assert world.links["a"].since == [0, 4, 0]


class ChangesLink(Link):
    """Answers from a node that knows its changes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.history, self.calls, self.refused = ViewHistory(), [], None
        self.links = LinkChanges(1, True, ())

    async def call(self, message, kind, timeout_s=10.0):
        self.calls.append(message)
        if self.refused and isinstance(message, self.refused[0]):
            text = "refused"
            raise RejectedError(text, code=self.refused[1])
        if isinstance(message, DescribeChanges):
            return self.history.changes(message, self.node.view(), self.links)
        if isinstance(message, ListChanges):
            listed = self.node._list()
            rows = tuple(map(AgentRow.of, listed.agents))
            return AgentChanges(listed.incarnation, listed.changes, 0, rows)
        return await super().call(message, kind, timeout_s)


class ChangesWorld(World):
    def connect(self, name, transport, is_lost):
        self.links[name] = ChangesLink(name, transport, self.clock)
        return self.links[name]


async def test_heartbeat_returns_view_changes():
    world = ChangesWorld("a")
    await world.membership.discover()
    member, node = world.membership.find("a"), world.nodes["a"]
    await world.heartbeat("a")
    first = member.view
    await world.heartbeat("a")
    assert member.view is first
    assert world.links["a"].calls[-1] == DescribeChanges(first.incarnation, 1, 1)
    node.view_changes = {"prefill_tokens_per_s": 5.0}
    await world.heartbeat("a")
    assert member.view == node.view()
    assert member.known == (2, 1)
    assert world.observer.lists == [("a", 1, 0, 1_000.0)]
    await node.restart()
    await node.stop()
    await world.heartbeat("a")
    assert member.view == node.view()
    assert world.observer.restarts == ["a"]


async def test_unknown_version_returns_whole_view():
    world = ChangesWorld("a")
    await world.membership.discover()
    member = world.membership.find("a")
    await world.heartbeat("a")
    member.known = (7, 7)  # of a life that the node does not remember
    await world.heartbeat("a")
    assert member.view == world.nodes["a"].view()
    assert member.known == (1, 1)


@pytest.mark.parametrize(
    ("refused", "code"), [(DescribeChanges, "unknown_call"), (ListChanges, "other_columns")]
)
async def test_older_node_gets_older_calls(refused, code):
    world = ChangesWorld("a")
    await world.membership.discover()
    link, member = world.links["a"], world.membership.find("a")
    link.refused = (refused, code)
    await world.heartbeat("a")
    await world.heartbeat("a")
    assert member.view == world.nodes["a"].view()
    assert len(world.observer.lists) == 1
    assert sum(isinstance(call, refused) for call in link.calls) == 1
    member.listed = (1, -1)
    await world.heartbeat("a")
    assert sum(isinstance(call, refused) for call in link.calls) == 1, "not tried again"
    link.refused = None
    world.nodes["a"].incarnation += 1  # and is of this version then
    await world.heartbeat("a")
    await world.heartbeat("a")
    assert any(isinstance(call, refused) for call in link.calls[-3:])


async def test_changes_to_unknown_view_are_rejected():
    world = ChangesWorld("a")
    await world.membership.discover()
    link, member = world.links["a"], world.membership.find("a")
    link.history.changes = lambda *_: ViewChanges(1, 9, 8, 1)
    await world.heartbeat("a")
    assert member.view is None


async def test_heartbeats_of_large_fleet_are_spread(monkeypatch):
    monkeypatch.setattr("router.fleet.membership.HEARTBEATS_AT_ONCE_MAX", 2)
    world = World(*"abcdefg")
    await world.membership.discover()
    world.membership.heartbeat_s = 0.04
    sent = []
    monkeypatch.setattr(world.membership, "nudge", sent.append)
    sending = asyncio.create_task(world.membership._nudge_all())
    await asyncio.sleep(0)
    assert len(sent) == 2
    await sending
    assert sorted(sent) == list("abcdefg")
