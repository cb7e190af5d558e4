"""Index of the prefixes that nodes have cached: a radix tree over sketches, per tenant.

    root ──[system prompt]──┬──[agent 1's turns]      each edge: consecutive piece hashes
                            └──[agent 2's turns]      each tree node: which agents end there

The index is a hint: a wrong entry costs a recomputation, never a wrong answer.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final

from fabric.ids import AgentId, NodeName, TenantId
from fabric.turn.sketch import common_pieces
from router.limits import ALIKE_AGENTS_MAX, SKETCH_AGENTS_MAX, SKETCH_PIECES_KEPT_MAX

Holder = tuple[NodeName, AgentId]
_NO_OPENING: Final = -1  # of a prompt that is not a conversation yet


class HeadState(StrEnum):
    """State of a prompt's beginning on a node."""

    STORED = "stored"
    COMING = "coming"  # a turn was sent there that is going to compute it
    BORROWED = "borrowed"  # such a turn takes it from another node


@dataclass(frozen=True, slots=True)
class Match:
    """Part of a prompt that a node has cached."""

    pieces_count: int
    # Agent whose whole sketch is a prefix of the prompt: the conversation continues it.
    continued: AgentId | None = None
    state: HeadState = HeadState.STORED


class NodeCounts(dict[NodeName, int]):
    """Numbers of agents by node; `changes` counts the nodes that came or went."""

    changes = 0

    def add(self, node: NodeName, change: int) -> None:
        """Add to a node's number, and drop the node at zero."""
        before = self.get(node, 0)
        now = before + change
        if now > 0:
            self[node] = now
            self.changes += not before
        elif before:
            del self[node]
            self.changes += 1


@dataclass(slots=True)
class _Branch:
    edge: "array[int]"
    parent: "_Branch | None"
    depth: int = 0  # pieces from the root to the end of its edge
    children: dict[int, "_Branch"] = field(default_factory=dict)
    holders: dict[NodeName, dict[AgentId, None]] = field(default_factory=dict)
    below: NodeCounts = field(default_factory=NodeCounts)  # holders here and further down
    # Of those, prompts on their way to nodes that compute them, and that take them from others.
    coming: NodeCounts | None = None
    borrowed: NodeCounts | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Beginning of a prompt, and the nodes that have it."""

    pieces_count: int
    nodes: NodeCounts  # with the number of agents that begin like this
    # Agents by node whose whole sketch this is, the latest last.
    agents: Mapping[NodeName, dict[AgentId, None]]
    coming: Mapping[NodeName, int] | None = None  # of `nodes`, those that do not have it yet
    borrowed: Mapping[NodeName, int] | None = None

    def state(self, node: NodeName) -> HeadState:
        """Return the state of this beginning on a node."""
        coming = self.coming.get(node, 0) if self.coming else 0
        borrowed = self.borrowed.get(node, 0) if self.borrowed else 0
        if self.nodes.get(node, 0) > coming + borrowed:
            return HeadState.STORED
        return HeadState.COMING if coming else HeadState.BORROWED


class SketchIndex:
    """Longest common sketch by node, in time proportional to the match's branches."""

    def __init__(self) -> None:
        self._roots: dict[TenantId, _Branch] = {}
        # In the order in which they were stored, the oldest first.
        self._places: OrderedDict[tuple[TenantId, Holder], tuple[_Branch, object]] = OrderedDict()
        self._pieces_count = 0
        self._openings: dict[tuple[TenantId, Holder], int] = {}  # of turns placed by this router
        self._coming_count = 0
        self._unstored: dict[tuple[TenantId, Holder], HeadState] = {}  # of prompts on their way
        # By the forms of conversations, in which clocks and reminders do not count.
        self._formed: dict[tuple[TenantId, int], dict[Holder, None]] = {}
        self._forms: dict[tuple[TenantId, Holder], int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def put(
        self,
        tenant: TenantId,
        node: NodeName,
        agent: AgentId,
        sketch: Sequence[int],
        tag: object = None,
        opening: int | None = None,
        form: int | None = None,
        *,
        is_coming: bool = False,
    ) -> None:
        """Store an agent's sketch and form, unless `tag` shows that it is unchanged.

        With `is_coming`, its node still computes it, until `settle`.
        """
        key = (tenant, (node, agent))
        known = self._places.get(key)
        if known is not None and tag is not None and known[1] == tag:
            return
        if opening is None:
            opening = self._openings.get(key)
        if known is not None and self._lengthen(known[0], sketch):
            self.settle(tenant, node, agent)
            self._forget_form(tenant, (node, agent))
            self._places.move_to_end(key)
            self._places[key] = (known[0], tag)
        else:
            self.remove(tenant, node, agent)
            if not sketch:
                return
            self._add(key, sketch, tag)
        if is_coming:
            self._mark_unstored(key, HeadState.COMING)
        if opening is not None:
            self._openings[key] = opening
        if form is not None:
            self._forms[key] = form
            self._formed.setdefault((tenant, form), {})[key[1]] = None
        self._make_room()

    def _lengthen(self, leaf: _Branch, sketch: Sequence[int]) -> bool:
        """Extend a leaf in place to its only agent's longer sketch; return False if it is not."""
        edge, depth = leaf.edge, leaf.depth
        if leaf.children or len(leaf.holders) > 1 or len(sketch) < depth:
            return False
        if sketch[depth - 1] != edge[-1] or any(len(held) > 1 for held in leaf.holders.values()):
            return False
        if len(sketch) > depth:
            leaf.edge = edge + array("Q", sketch[depth:])
            leaf.depth = len(sketch)
            self._pieces_count += leaf.depth - depth
        return True

    def _add(self, key: tuple[TenantId, Holder], sketch: Sequence[int], tag: object) -> None:
        tenant, (node, agent) = key
        root = self._roots.setdefault(tenant, _Branch(array("Q"), None))
        leaf, added_count = _descend(root, array("Q", sketch))
        self._pieces_count += added_count
        leaf.holders.setdefault(node, {})[agent] = None
        self._places[key] = (leaf, tag)
        _count(leaf, node, 1)

    def _mark_unstored(self, key: tuple[TenantId, Holder], state: HeadState) -> None:
        self._unstored[key] = state
        _count_unstored(self._places[key][0], key[1][0], 1, state)

    def _make_room(self) -> None:
        while self._is_full() and len(self._places) > 1:
            oldest, (its_node, its_agent) = next(iter(self._places))
            self.remove(oldest, its_node, its_agent)

    def _is_full(self) -> bool:
        is_long = self._pieces_count > SKETCH_PIECES_KEPT_MAX
        return is_long or len(self._places) > SKETCH_AGENTS_MAX

    def extend(
        self,
        tenant: TenantId,
        node: NodeName,
        agent: AgentId,
        kept: tuple[int, int],
        more: Sequence[int],
        tag: object = None,
        form: int | None = None,
    ) -> bool:
        """Replace an agent's sketch after its first pieces; return False if it lacks one of those.

        `kept` is the number of those pieces and the hash of the last, which includes all of them.
        """
        place = self._places.get((tenant, (node, agent)))
        if place is None:
            return False
        if tag is not None and place[1] == tag:
            return True
        sketch, (count, last) = _sketch_of(place[0]), kept
        if not 0 < count <= len(sketch) or sketch[count - 1] != last:
            return False
        self.put(tenant, node, agent, sketch[:count] + array("Q", more), tag, form=form)
        return True

    def put_coming(
        self, tenant: TenantId, node: NodeName, sketch: Sequence[int], *, borrows: bool = False
    ) -> AgentId:
        """Store a prompt that a node is about to compute; return the name under which to remove it.

        Other prompts find their beginning there, and none continues it. A node that `borrows`
        takes the beginning from another node.
        """
        self._coming_count += 1
        name = AgentId(f"\0{self._coming_count}")  # no agent's
        if sketch:
            key = (tenant, (node, name))
            self._openings[key] = _NO_OPENING
            self._add(key, sketch, None)
            self._mark_unstored(key, HeadState.BORROWED if borrows else HeadState.COMING)
            self._make_room()
        return name

    def settle(self, tenant: TenantId, node: NodeName, agent: AgentId) -> None:
        """Note that a node has computed an agent's sketch that was coming."""
        key = (tenant, (node, agent))
        state = self._unstored.pop(key, None)
        if state is not None:
            _count_unstored(self._places[key][0], node, -1, state)

    def remove(self, tenant: TenantId, node: NodeName, agent: AgentId) -> None:
        """Remove an agent on a node, if it is there."""
        key = (tenant, (node, agent))
        if key not in self._places:
            return
        self.settle(tenant, node, agent)
        self._openings.pop(key, None)
        self._forget_form(tenant, (node, agent))
        leaf, _ = self._places.pop(key)
        agents = leaf.holders[node]
        del agents[agent]
        if not agents:
            del leaf.holders[node]
        _count(leaf, node, -1)
        branch: _Branch | None = leaf
        while branch and branch.parent and not branch.holders and not branch.children:
            del branch.parent.children[branch.edge[0]]
            self._pieces_count -= len(branch.edge)
            branch = branch.parent

    def _forget_form(self, tenant: TenantId, holder: Holder) -> None:
        form = self._forms.pop((tenant, holder), None)
        if form is not None:
            holders = self._formed[tenant, form]
            del holders[holder]
            if not holders:
                del self._formed[tenant, form]

    def formed(self, tenant: TenantId, forms: Iterable[int]) -> Iterator[Holder]:
        """Yield the agents with these forms in their order, of each the one stored last first."""
        for form in forms:
            yield from reversed(self._formed.get((tenant, form), {}))

    def matches(
        self, tenant: TenantId, sketch: Sequence[int], opening: int | None = None
    ) -> dict[NodeName, Match]:
        """Return, for each node that has part of the prompt, how much and of which agent.

        Sketches are coarse: a conversation with another known `opening` is a different one.
        """
        matches: dict[NodeName, Match] = {}
        for level in self.levels(tenant, sketch):
            for node in level.nodes:
                before = matches.get(node)
                continued = before.continued if before else None
                matches[node] = Match(level.pieces_count, continued, level.state(node))
            for node in level.agents:
                agent = self.continued(tenant, node, level, opening)
                if agent is not None:
                    matches[node] = Match(level.pieces_count, agent, level.state(node))
        return matches

    def continued(
        self, tenant: TenantId, node: NodeName, level: Level, opening: int | None
    ) -> AgentId | None:
        """Return an agent of a node that a prompt continues which begins like a level."""
        latest = islice(reversed(level.agents[node]), ALIKE_AGENTS_MAX)
        alike = (
            agent
            for agent in latest
            if self._openings.get((tenant, (node, agent)), opening) == opening
        )
        return max(alike, default=None)

    def levels(self, tenant: TenantId, sketch: Sequence[int]) -> list[Level]:
        """Return the beginnings of a prompt that nodes have, the shortest first."""
        levels: list[Level] = []
        branch = self._roots.get(tenant)
        depth = 0
        while branch is not None and depth < len(sketch):
            child = branch.children.get(sketch[depth])
            if child is None:
                break
            common = common_pieces(child.edge, sketch[depth:])
            depth += common
            is_whole = common == len(child.edge)
            agents = child.holders if is_whole else {}
            levels.append(Level(depth, child.below, agents, child.coming, child.borrowed))
            if not is_whole:
                break
            branch = child
        return levels


def _sketch_of(leaf: _Branch) -> "array[int]":
    edges: list[array[int]] = []
    branch: _Branch | None = leaf
    while branch is not None:
        edges.append(branch.edge)
        branch = branch.parent
    sketch = array("Q")
    for edge in reversed(edges):
        sketch.extend(edge)
    return sketch


def _descend(branch: _Branch, sketch: "array[int]") -> tuple[_Branch, int]:
    """Return the branch at which `sketch` ends, and the number of pieces that were added."""
    while sketch:
        child = branch.children.get(sketch[0])
        if child is None:
            leaf = _Branch(sketch, branch, branch.depth + len(sketch))
            branch.children[sketch[0]] = leaf
            return leaf, len(sketch)
        common = common_pieces(child.edge, sketch)
        if common < len(child.edge):
            child = _split(child, common)
        branch, sketch = child, sketch[common:]
    return branch, 0


def _split(branch: _Branch, at: int) -> _Branch:
    """Split a branch's edge after `at` pieces; return the new parent of both parts."""
    parent = branch.parent
    assert parent is not None, "the root has no edge to split"
    front = _Branch(
        branch.edge[:at],
        parent,
        parent.depth + at,
        below=NodeCounts(branch.below),
        coming=NodeCounts(branch.coming) if branch.coming else None,
        borrowed=NodeCounts(branch.borrowed) if branch.borrowed else None,
    )
    parent.children[front.edge[0]] = front
    branch.edge, branch.parent = branch.edge[at:], front
    front.children[branch.edge[0]] = branch
    return front


def _count(leaf: _Branch, node: NodeName, change: int) -> None:
    branch: _Branch | None = leaf
    while branch is not None:
        branch.below.add(node, change)
        branch = branch.parent


def _count_unstored(leaf: _Branch, node: NodeName, change: int, state: HeadState) -> None:
    branch: _Branch | None = leaf
    while branch is not None:
        if state is HeadState.COMING:
            branch.coming = branch.coming or NodeCounts()
            branch.coming.add(node, change)
        else:
            branch.borrowed = branch.borrowed or NodeCounts()
            branch.borrowed.add(node, change)
        branch = branch.parent
