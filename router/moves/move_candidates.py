"""The nodes that may take a given agent, as its next owner or for a copy of it."""

from collections import Counter
from collections.abc import Container

from fabric.control.node_calls import AgentView, NodeView
from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.placement import link_rates
from router.placement.destination import Site


def is_current(replica: Holding, owner: Holding) -> bool:
    """Say whether a node's copy holds what the owner has saved last.

    Revisions do not tell: an owner that was lost and its successor count on from the same one.
    """
    if replica.view is None or owner.view is None:
        return False
    return replica.view.tail == owner.view.tail != ""


def replicas(fleet: Fleet, key: AgentKey) -> list[Holding]:
    """List the copies of an agent on nodes that answer."""
    holdings = fleet.directory.living(key)
    return [h for h in holdings if h.state is OwnerState.REPLICA and fleet.is_up(h.node)]


class Sites:
    """What is known of the nodes, and what this router has just sent each of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.coming_bytes: Counter[NodeName] = Counter()

    def of(self, key: AgentKey, owner: Holding, without: Container[NodeName] = ()) -> list[Site]:
        """List the nodes that run the owner's model, take agents, and are none of `without`."""
        member = self._fleet.membership.find(owner.node)
        home = member.view if member is not None else None
        if home is None:
            return []
        held = {h.node: h.view for h in replicas(self._fleet, key)}
        return [
            self._site(home, view, owner.view, held.get(view.name))
            for view in self._fleet.ready()
            if view.name != owner.node
            and view.name not in without
            and view.fingerprint == home.fingerprint
            and view.reuse
            and view.degraded is None
        ]

    def _site(
        self, home: NodeView, view: NodeView, agent: AgentView | None, held: AgentView | None
    ) -> Site:
        coming, free = self.coming_bytes[view.name], view.free
        return Site(
            name=view.name,
            missing_bytes=missing_bytes(agent, held),
            link_bytes_per_s=link_rates.rate(home, view),
            prefill_tokens_per_s=view.prefill_tokens_per_s,
            decode_tokens_per_s=view.decode_tokens_per_s,
            queue_s=self._fleet.ledger.prefill_s(view.name),
            active=self._fleet.ledger.turns(view.name),
            held_tokens=view.tokens + coming // max(1, view.bytes_per_token),
            hot_free_bytes=free.hot - coming if free else None,
            disk_free_bytes=free.disk - coming if free else None,
        )


def missing_bytes(agent: AgentView | None, held: AgentView | None) -> int:
    """Estimate what a node with an older copy lacks: the tokens that came since."""
    if agent is None or agent.tokens <= 0:
        return 0
    known = min(held.tokens, agent.tokens) if held is not None else 0
    share = 1.0 - known / agent.tokens
    return round(share * max(agent.bytes.disk, agent.bytes.hot))
