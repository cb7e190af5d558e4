"""Hand-made nodes and fleets for placement decisions."""

from dataclasses import replace

from fabric.control.node_calls import READY, NodeView, SelfTest, TierBytes
from fabric.ids import NodeName
from router.placement.snapshot import AgentHolder, FleetSnapshot, HolderRole, NodeSnapshot

TIERS, TESTED = TierBytes(0, 0), SelfTest(passed=True, detail="", seconds=0.0)


def view(name, prefill=1000.0, decode=0.0, **changes):
    words = (NodeName(name), name, 1, 1, "", "m", "f", 1, READY, 0, 0, TIERS, (), 0, 0, 0.0)
    return replace(NodeView(*words, prefill, decode, 1000, TESTED), **changes)


def node(name, *, known=None, **words):
    """Make a node with `words` in its view, and `known` in the router's tables."""
    return NodeSnapshot(view(name, **words), **(known or {}))


def holder(name, role=HolderRole.OWNER, held=None):
    return AgentHolder(NodeName(name), role, held)


def fleet(*nodes, **held):
    return FleetSnapshot({each.name: each for each in nodes}, **held)
