"""Index of the prefixes that nodes have cached: a radix tree over sketches, per tenant.

    root ──[system prompt]──┬──[agent 1's turns]      each edge: consecutive piece hashes
                            └──[agent 2's turns]      each tree node: which agents end there

The index is a hint: a wrong entry costs a recomputation, never a wrong answer.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from fabric.ids import AgentId, NodeName, TenantId
from fabric.turn.sketch import common_pieces
from router.limits import SKETCH_AGENTS_MAX

Holder = tuple[NodeName, AgentId]
_NO_OPENING: Final = -1  # of a prompt that is not a conversation yet


@dataclass(frozen=True, slots=True)
class Match:
    """Part of a prompt that a node has cached."""

    pieces_count: int
    # Agent whose whole sketch is a prefix of the prompt: the conversation continues it.
    continued: AgentId | None = None


@dataclass(slots=True)
class _Branch:
    edge: Sequence[int]
    parent: "_Branch | None"
    children: dict[int, "_Branch"] = field(default_factory=dict)
    holders: set[Holder] = field(default_factory=set)
    below: Counter[NodeName] = field(default_factory=Counter)  # holders here and further down


class SketchIndex:
    """Longest common sketch by node, in time proportional to the match's branches."""

    def __init__(self) -> None:
        self._roots: dict[TenantId, _Branch] = {}
        self._places: dict[tuple[TenantId, Holder], tuple[_Branch, object]] = {}
        self._openings: dict[tuple[TenantId, Holder], int] = {}  # of turns placed by this router
        self._coming_count = 0
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
    ) -> None:
        """Store an agent's sketch and form, unless `tag` shows that it is unchanged."""
        key = (tenant, (node, agent))
        known = self._places.get(key)
        if known is not None and tag is not None and known[1] == tag:
            return
        if opening is None:
            opening = self._openings.get(key)
        self.remove(tenant, node, agent)
        if not sketch or len(self._places) >= SKETCH_AGENTS_MAX:
            return
        root = self._roots.setdefault(tenant, _Branch((), None))
        leaf = _descend(root, array("Q", sketch))
        leaf.holders.add((node, agent))
        self._places[key] = (leaf, tag)
        if opening is not None:
            self._openings[key] = opening
        if form is not None:
            self._forms[key] = form
            self._formed.setdefault((tenant, form), {})[key[1]] = None
        _count(leaf, node, 1)

    def put_coming(self, tenant: TenantId, node: NodeName, sketch: Sequence[int]) -> AgentId:
        """Store a prompt that a node is about to compute; return the name under which to remove it.

        Other prompts find their beginning there, and none continues it.
        """
        self._coming_count += 1
        name = AgentId(f"\0{self._coming_count}")  # no agent's
        self.put(tenant, node, name, sketch, opening=_NO_OPENING)
        return name

    def remove(self, tenant: TenantId, node: NodeName, agent: AgentId) -> None:
        """Remove an agent on a node, if it is there."""
        place = self._places.pop((tenant, (node, agent)), None)
        if place is None:
            return
        self._openings.pop((tenant, (node, agent)), None)
        self._forget_form(tenant, (node, agent))
        branch: _Branch | None = place[0]
        place[0].holders.discard((node, agent))
        _count(place[0], node, -1)
        while branch and branch.parent and not branch.holders and not branch.children:
            del branch.parent.children[branch.edge[0]]
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
        branch = self._roots.get(tenant)
        depth = 0
        while branch is not None and depth < len(sketch):
            child = branch.children.get(sketch[depth])
            if child is None:
                break
            common = common_pieces(child.edge, sketch[depth:])
            depth += common
            for node in child.below:
                before = matches.get(node)
                matches[node] = Match(depth, before.continued if before else None)
            if common < len(child.edge):
                break
            for node, agent in sorted(child.holders):
                if self._openings.get((tenant, (node, agent)), opening) == opening:
                    matches[node] = Match(depth, agent)
            branch = child
        return matches


def _descend(branch: _Branch, sketch: Sequence[int]) -> _Branch:
    """Return the branch at which `sketch` ends, adding and splitting branches as needed."""
    while sketch:
        child = branch.children.get(sketch[0])
        if child is None:
            leaf = _Branch(sketch, branch)
            branch.children[sketch[0]] = leaf
            return leaf
        common = common_pieces(child.edge, sketch)
        if common < len(child.edge):
            child = _split(child, common)
        branch, sketch = child, sketch[common:]
    return branch


def _split(branch: _Branch, at: int) -> _Branch:
    """Split a branch's edge after `at` pieces; return the new parent of both parts."""
    parent = branch.parent
    assert parent is not None, "the root has no edge to split"
    front = _Branch(branch.edge[:at], parent, below=Counter(branch.below))
    parent.children[front.edge[0]] = front
    branch.edge, branch.parent = branch.edge[at:], front
    front.children[branch.edge[0]] = branch
    return front


def _count(leaf: _Branch, node: NodeName, change: int) -> None:
    branch: _Branch | None = leaf
    while branch is not None:
        branch.below[node] += change
        if branch.below[node] <= 0:
            del branch.below[node]
        branch = branch.parent
