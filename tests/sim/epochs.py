"""Epochs that one client has seen of its agents: none of them may ever decrease.

One router never gives an epoch out twice, so none goes back while it lives. The next router has
only what nodes report: where the newer claim's node is away, it serves from the older owner until
that node is back, and not below any epoch reported to it.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Epochs:
    """By agent, as by its content a conversation may go on as another agent than before."""

    _seen: dict = field(default_factory=dict)  # (agent, the router's incarnation): the highest

    def note(self, agent, router, epoch):
        """Take down what answered."""
        self._seen[agent, router] = max(epoch, self._seen.get((agent, router), 0))

    def clear(self):
        """Forget all: they are erased."""
        self._seen.clear()

    def floor(self, agent, router, reported_epoch):
        """Return what this router must not go below, given the highest epoch reported to it."""
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
