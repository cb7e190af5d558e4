"""Snapshots of a fleet with more nodes than one decision compares."""

from dataclasses import replace

import pytest

from fabric.ids import AgentId, NodeName
from fabric.record.manifest import OwnerState
from router.fleet import snapshots
from router.placement.placement import Placement
from tests.router.fleet.test_snapshots import GROUPED, KEY, NAMED, UNNAMED, A, B, C, turn
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
D, E, F, G = (NodeName(f"node-{letter}") for letter in "defg")
OWNED, REPLICA = OwnerState.OWNED, OwnerState.REPLICA


@pytest.fixture(autouse=True)
def small_candidate_limits(monkeypatch):
    """Limit a decision to two candidates."""
    for module in ("node_snapshots", "snapshots"):
        monkeypatch.setattr(f"router.fleet.{module}.CANDIDATES_MAX", 2)
    for name in ("HOMES_MAX", "GROUP_NODES_MAX"):
        monkeypatch.setattr(f"router.fleet.snapshots.{name}", 1)


async def test_snapshot_contains_only_candidates():
    async with rig("abcdefg", tended=False) as fabric:
        fleet = fabric.fleet
        for name in (A, B, C, D, E, F):
            fabric[name].view_changes = {"prefill_tokens_per_s": 1.0}
        await fleet.membership.refresh()
        found = snapshots.of_turn(fleet, UNNAMED)
        assert G in found.nodes
        assert found.home in found.nodes
        assert len(found.nodes) <= 3
        assert Placement().decide(snapshots.facts_of(UNNAMED), found).node == G
        assert len(snapshots.of_turn(fleet, UNNAMED, is_whole=True).nodes) == 7

        excluded = frozenset({G})
        without = snapshots.of_turn(fleet, UNNAMED, excluded)
        facts = snapshots.facts_of(UNNAMED, excluded)
        assert Placement().decide(facts, without).node != G


async def test_snapshot_of_owned_agent_contains_its_holders():
    async with rig("abcdefg", tended=False) as fabric:
        fabric.fleet.note_holding(KEY, C, 2, OWNED)
        fabric.fleet.note_holding(KEY, D, 1, REPLICA)
        found = snapshots.of_turn(fabric.fleet, NAMED)
        assert set(found.nodes) == {C, D}
        assert Placement().decide(snapshots.facts_of(NAMED), found).node == C

        fabric.fleet.membership.find(C).heartbeat_s -= 60
        found = snapshots.of_turn(fabric.fleet, NAMED)
        assert {C, D} < set(found.nodes)
        assert Placement().decide(snapshots.facts_of(NAMED), found).node == D


@pytest.mark.parametrize("turn", [NAMED, UNNAMED], ids=["named", "found by content"])
async def test_idle_agent_may_move_to_nodes_with_least_load(turn):
    async with rig("abcdefg", tended=False) as fabric:
        fleet, prompt = fabric.fleet, turn.prompt
        for name in (A, B, C, D, E, F):
            fleet.ledger.begin(name, 60.0, cold=True)
        fleet.note_holding(KEY, C, 2, OWNED)
        fleet.note_holding(KEY, D, 1, REPLICA)
        fleet.sketches.put(KEY[0], C, KEY[1], prompt.sketch, opening=prompt.opening)
        found = snapshots.of_turn(fleet, turn)
        assert not found.is_idle
        wide = snapshots.with_move_targets(fleet, turn, found)
        assert wide.is_idle
        assert wide.agent == KEY[1]
        assert set(wide.nodes) >= {*found.nodes, C, D, G}

        fleet.activity.begin_turn(KEY)
        assert snapshots.with_move_targets(fleet, turn, found) is found, "a turn runs"
        fleet.activity.end_turn(KEY)
        fleet.activity.hold(KEY, C)
        assert snapshots.with_move_targets(fleet, turn, found) is found, "a client placed it"


async def test_nodes_with_prefix_or_group_are_candidates():
    async with rig("abcdefg", tended=False) as fabric:
        fleet, prompt = fabric.fleet, UNNAMED.prompt
        fleet.note_holding((KEY[0], AgentId("x")), F, 1, OWNED, "team")
        assert F in snapshots.of_turn(fleet, GROUPED).nodes
        fleet.sketches.put(KEY[0], E, "mira", prompt.sketch, opening=prompt.opening)
        fleet.sketches.put(KEY[0], B, "bob", (*prompt.sketch[:4], 1), opening=1)
        found = snapshots.of_turn(fleet, UNNAMED)
        assert [each.agent for each in found.prefixes if each.node == E] == ["mira"]
        assert Placement().decide(snapshots.facts_of(UNNAMED), found).node == E
        assert set(snapshots.of_turn(fleet, GROUPED).nodes) == {E}, "its owner is up"

        long = turn(UNNAMED.identity.kind, text="word " * 20_000).prompt
        fleet.sketches.put(KEY[0], E, "mira", long.sketch, opening=long.opening)
        begun = turn(UNNAMED.identity.kind, text="word " * 19_000 + "other")
        found = snapshots.of_turn(fleet, begun)
        assert E in {each.node for each in found.prefixes}
        assert all(each.agent is None for each in found.prefixes)


async def test_ranking_follows_load_state_and_lease():
    async with rig("abcdefg", tended=False) as fabric:
        fleet = fabric.fleet
        speed = {"prefill_tokens_per_s": 9_000.0}
        fabric[G].view_changes = speed
        await fleet.membership.refresh()

        def first_names():
            found = snapshots.of_turn(fleet, replace(UNNAMED, tenant="other"))
            return Placement().decide(snapshots.facts_of(UNNAMED), found).node

        assert first_names() == G
        booked = fleet.ledger.begin(G, 600.0, cold=True)
        assert first_names() != G
        fleet.ledger.end(booked)
        assert first_names() == G
        fabric[G].view_changes = speed | {"state": "draining"}
        await fleet.membership.refresh()
        assert first_names() != G
        assert len(fleet.nodes.ranking("echo")) == 6
        fabric[G].view_changes = speed
        await fleet.membership.refresh()
        assert first_names() == G
        fleet.membership.find(G).heartbeat_s -= 60
        assert first_names() != G, "before the expired lease was counted"
        fleet.membership._count_expired()
        assert len(fleet.nodes.ranking("echo")) == 6
        fabric[G].view_changes = speed | {"model": "another"}
        await fleet.membership.heartbeat(fleet.membership.find(G))
        assert len(fleet.nodes.ranking("another")) == 1
        assert fleet.models() == ["another", "echo"]


async def test_migration_candidates_include_measured_peer_or_idle_node():
    async with rig("abcdefg", tended=False) as fabric:
        fabric.fleet.note_holding(KEY, C, 2, OWNED)
        found = snapshots.of_agent(fabric.fleet, KEY)
        assert C in found.nodes
        assert 2 <= len(found.nodes) <= 3
