"""Last nodes of sessions and sub-agents, by the headers in which coding agents name them.

A hint: among nodes that cost the same, a conversation without a known beginning starts where its
sub-agent had its last turn, or else its session. What is reused is decided by content alone.
"""

from collections import OrderedDict

from fabric.ids import AgentId, NodeName, TenantId
from router.limits import SESSIONS_MAX


class Sessions:
    """Node of each one's last turn; the oldest are forgotten."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[TenantId, AgentId], NodeName] = OrderedDict()

    def note(self, tenant: TenantId, node: NodeName, *names: AgentId | None) -> None:
        """Note a turn that a node has admitted, of sessions and sub-agents that have names."""
        for name in names:
            if name is None:
                continue
            self._nodes[tenant, name] = node
            self._nodes.move_to_end((tenant, name))
            if len(self._nodes) > SESSIONS_MAX:
                self._nodes.popitem(last=False)

    def nodes(self, tenant: TenantId, *names: AgentId | None) -> tuple[NodeName, ...]:
        """Return the nodes of their last turns that are known, in the order of the names."""
        nodes = (self._nodes.get((tenant, name)) for name in names if name is not None)
        return tuple(dict.fromkeys(node for node in nodes if node is not None))
