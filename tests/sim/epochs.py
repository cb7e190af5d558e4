"""Epochs of a client's agents, as reported to it: they may never decrease.

One router never issues an epoch twice, so epochs do not decrease during its life. The next router
knows only what nodes report: while the newer claim's node is away it serves from the older owner,
but never below any epoch reported to it.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Epochs:
    """Highest epochs by agent: a conversation found by content may continue as another agent."""

    _seen: dict = field(default_factory=dict)  # (agent, the router's incarnation): the highest

    def note(self, agent, router, epoch):
        """Record the epoch of an answer."""
        self._seen[agent, router] = max(epoch, self._seen.get((agent, router), 0))

    def clear(self):
        """Drop the epochs of an erased agent."""
        self._seen.clear()

    def floor(self, agent, router, reported_epoch):
        """Return the lowest epoch that this router may use, given the highest reported one."""
        seen = [
            epoch if by == router else min(epoch, reported_epoch)
            for (other, by), epoch in self._seen.items()
            if other == agent
        ]
        return max(seen, default=0)


def reported_epochs(router, nodes, tenant):
    """Return the highest epoch by agent among the nodes that have reported to this router."""
    services, epochs = router.services, {}
    members = services.fleet.membership.members if services is not None else ()
    for node in (nodes[member.name].node for member in members if member.listed is not None):
        for record in (
            (agent.manifest for agent in node.resources.table) if node is not None else ()
        ):
            if record.tenant == tenant:
                epochs[record.agent] = max(record.epoch, epochs.get(record.agent, 0))
    return epochs
