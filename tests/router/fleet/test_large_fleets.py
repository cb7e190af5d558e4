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
def few(monkeypatch):
    """Let a decision compare two nodes."""
    for module in ("node_snapshots", "snapshots"):
        monkeypatch.setattr(f"router.fleet.{module}.CANDIDATES_MAX", 2)
    for name in ("HOMES_MAX", "GROUP_NODES_MAX"):
        monkeypatch.setattr(f"router.fleet.snapshots.{name}", 1)


async def test_only_candidates_are_looked_at():
    async with rig("abcdefg", tended=False) as made:
        fleet = made.fleet
        for name in (A, B, C, D, E, F):
            made[name].view_changes = {"prefill_tokens_per_s": 1.0}
        await fleet.membership.refresh()
        found = snapshots.of_turn(fleet, UNNAMED)
        assert G in found.nodes
        assert found.home in found.nodes
        assert len(found.nodes) <= 3
        assert Placement().decide(snapshots.facts_of(UNNAMED), found).node == G
        assert len(snapshots.of_turn(fleet, UNNAMED, is_whole=True).nodes) == 7

        given_up = frozenset({G})
        without = snapshots.of_turn(fleet, UNNAMED, given_up)
        facts = snapshots.facts_of(UNNAMED, given_up)
        assert Placement().decide(facts, without).node != G


async def test_an_owner_is_all_that_its_turn_needs():
    async with rig("abcdefg", tended=False) as made:
        made.fleet.note_holding(KEY, C, 2, OWNED)
        made.fleet.note_holding(KEY, D, 1, REPLICA)
        found = snapshots.of_turn(made.fleet, NAMED)
        assert set(found.nodes) == {C, D}
        assert Placement().decide(snapshots.facts_of(NAMED), found).node == C

        made.fleet.membership.find(C).heartbeat_s -= 60
        found = snapshots.of_turn(made.fleet, NAMED)
        assert {C, D} < set(found.nodes)
        assert Placement().decide(snapshots.facts_of(NAMED), found).node == D


async def test_who_has_the_prompt_or_the_group_is_a_candidate():
    async with rig("abcdefg", tended=False) as made:
        fleet, prompt = made.fleet, UNNAMED.prompt
        fleet.sketches.put(KEY[0], E, "mira", prompt.sketch, opening=prompt.opening)
        fleet.sketches.put(KEY[0], B, "bob", (*prompt.sketch[:4], 1), opening=1)
        fleet.note_holding((KEY[0], AgentId("x")), F, 1, OWNED, "team")
        found = snapshots.of_turn(fleet, UNNAMED)
        assert [each.agent for each in found.prefixes if each.node == E] == ["mira"]
        assert Placement().decide(snapshots.facts_of(UNNAMED), found).node == E
        assert F in snapshots.of_turn(fleet, GROUPED).nodes

        long = turn(UNNAMED.identity.kind, text="word " * 20_000).prompt
        fleet.sketches.put(KEY[0], E, "mira", long.sketch, opening=long.opening)
        begun = turn(UNNAMED.identity.kind, text="word " * 19_000 + "other")
        found = snapshots.of_turn(fleet, begun)
        assert E in {each.node for each in found.prefixes}
        assert all(each.agent is None for each in found.prefixes)


async def test_rankings_follow_loads_states_and_leases():
    async with rig("abcdefg", tended=False) as made:
        fleet = made.fleet
        speed = {"prefill_tokens_per_s": 9_000.0}
        made[G].view_changes = speed
        await fleet.membership.refresh()

        def first():
            found = snapshots.of_turn(fleet, replace(UNNAMED, tenant="other"))
            return Placement().decide(snapshots.facts_of(UNNAMED), found).node

        assert first() == G
        booked = fleet.ledger.begin(G, 600.0, cold=True)
        assert first() != G
        fleet.ledger.end(booked)
        assert first() == G
        made[G].view_changes = speed | {"state": "draining"}
        await fleet.membership.refresh()
        assert first() != G
        assert len(fleet.nodes.ranking("echo")) == 6
        made[G].view_changes = speed
        await fleet.membership.refresh()
        assert first() == G
        fleet.membership.find(G).heartbeat_s -= 60
        assert first() != G, "before its silence was counted"
        fleet.membership._count_expired()
        assert len(fleet.nodes.ranking("echo")) == 6
        made[G].view_changes = speed | {"model": "another"}
        await fleet.membership.heartbeat(fleet.membership.find(G))
        assert len(fleet.nodes.ranking("another")) == 1
        assert fleet.models() == ["another", "echo"]


async def test_an_agent_moves_to_a_measured_peer_or_an_idle_node():
    async with rig("abcdefg", tended=False) as made:
        made.fleet.note_holding(KEY, C, 2, OWNED)
        found = snapshots.of_agent(made.fleet, KEY)
        assert C in found.nodes
        assert 2 <= len(found.nodes) <= 3
