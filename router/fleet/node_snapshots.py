"""Snapshots of single nodes, each kept until the node, its lease or its load changes.

    membership  a new view, a lease that ended      ┐
    ledger      a turn that began or ended          ├─▶ the node's snapshot is taken anew when it is
    directory   an agent that came or went          │   needed, and its row in the ranking with it
    profiles    a speed that turns have shown       ┘

A fleet of a few nodes has no ranking: all of its nodes are compared.
"""

from collections.abc import Iterable

from fabric.control.node_calls import NodeView
from fabric.ids import NodeName
from router.fleet.directory import Directory
from router.fleet.membership import LeaseState, Member, Membership
from router.limits import CANDIDATES_MAX
from router.placement.candidates import Ranking
from router.placement.load_ledger import Ledger, OwnLoad
from router.placement.profiles import Profiles
from router.placement.snapshot import NodeSnapshot


def _others_s(view: NodeView, own: OwnLoad) -> float:
    """Return the seconds of prefill in a report that this router did not give the node.

    The ledger is newer and follows each prompt, so it counts for the router's own turns.
    """
    if view.waiting + view.active <= own.turns:
        return 0.0
    return max(0.0, view.queue_s - own.prefill_s)


class NodeSnapshots:
    """Snapshots by node, and rankings of the ready nodes by model."""

    def __init__(
        self,
        membership: Membership,
        ledger: Ledger,
        directory: Directory,
        profiles: Profiles,
    ) -> None:
        self._membership = membership
        self._profiles = profiles
        self._ledger = ledger
        self._directory = directory
        self._kept: dict[NodeName, NodeSnapshot] = {}
        self._answered_s: dict[NodeName, float] = {}  # time of the last heartbeat noted here
        self._others_end_s: dict[NodeName, float] = {}  # end of prefill that others gave a node
        self._noted: dict[NodeName, tuple[NodeView | None, str]] = {}  # when last ranked
        self._rankings: dict[str, Ranking] = {}
        self._ranked: dict[NodeName, str] = {}  # the model under which a node is ranked
        self._unranked: set[NodeName] | None = None  # to be ranked anew; None: nothing is ranked

    @property
    def is_large(self) -> bool:
        """Whether the fleet has more nodes than one decision compares."""
        return len(self._membership.members) > CANDIDATES_MAX

    def note(self, member: Member, state: str) -> None:
        """Note that a node answered, or that its state changed."""
        name, view = member.name, member.view
        if view is not None and member.heartbeat_s != self._answered_s.get(name):
            self._answered_s[name] = member.heartbeat_s
            others_s = _others_s(view, self._ledger.take_own_load(name))
            if self._others_end_s.pop(name, 0.0) or others_s:
                self._kept.pop(name, None)
            if others_s:
                self._others_end_s[name] = member.heartbeat_s + others_s
        noted = self._noted.get(name)
        if noted is not None and noted[0] is view and noted[1] == state:
            return
        self._noted[name] = view, state
        if self._unranked is not None:
            self._unranked.add(name)

    def find(self, name: NodeName) -> NodeSnapshot | None:
        """Return a node's snapshot; None if it has not reported."""
        member = self._membership.find(name)
        if member is None or member.view is None:
            return None
        lease = self._membership.health(name)
        state = lease is LeaseState.ALIVE, lease is not LeaseState.EXPIRED
        is_returning = self._membership.is_returning(name)
        self._forget_changed()
        cached = self._kept.get(name)
        if (
            cached is not None
            and cached.view is member.view
            and (cached.is_alive, cached.is_up, cached.is_returning) == (*state, is_returning)
        ):
            return cached
        ledger = self._ledger
        prompts_s = ledger.prompts_s(name)
        snapshot = self._kept[name] = NodeSnapshot(
            view=member.view,
            is_alive=state[0],
            is_up=state[1],
            is_returning=is_returning,
            promised_s=sum(prompts_s),
            prompts_s=prompts_s,
            others_end_s=self._others_end_s.get(name, 0.0),
            turns=ledger.turns(name),
            agents=self._directory.agents_count(name),
            turn_order=ledger.turn_order(name),
            cold_order=ledger.cold_order(name),
            coming_bytes=ledger.coming_bytes(name),
            leaving_bytes=ledger.leaving_bytes(name),
            profile=self._profiles.of(name),
        )
        return snapshot

    def all(self) -> dict[NodeName, NodeSnapshot]:
        """Return the snapshots of all nodes that have reported, by name."""
        return self.of(member.name for member in self._membership.members)

    def of(self, names: Iterable[NodeName]) -> dict[NodeName, NodeSnapshot]:
        """Return the snapshots of some nodes, without those that have not reported."""
        nodes = ((name, self.find(name)) for name in names)
        return {name: node for name, node in nodes if node is not None}

    def ranking(self, model: str) -> Ranking:
        """Return the ranking of the nodes that take new agents and serve a model."""
        if self._unranked is None:
            self._unranked = {member.name for member in self._membership.members}
        self._forget_changed()
        while self._unranked:
            names, self._unranked = sorted(self._unranked), set()
            for name in names:  # in this order, as equal nodes keep that of their rows
                self._rank(name)
        return self._rankings.setdefault(model, Ranking())

    def _forget_changed(self) -> None:
        for changed in (self._ledger.changed, self._directory.recounted, self._profiles.changed):
            if changed:
                for name in changed:
                    self._kept.pop(name, None)
                if self._unranked is not None:
                    self._unranked |= changed
                changed.clear()

    def _rank(self, name: NodeName) -> None:
        node = self.find(name)
        model = node.view.model if node is not None and node.is_ready else None
        before = self._ranked.get(name)
        if before is not None and before != model:
            self._rankings[before].drop(name)
            del self._ranked[name]
        if node is not None and model is not None:
            self._rankings.setdefault(model, Ranking()).put(node)
            self._ranked[name] = model
