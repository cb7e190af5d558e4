"""Last nodes of sessions, by which coding agents name themselves and their sub-agents.

A hint: among nodes that cost the same, a conversation without a known beginning starts where its
session had its last turn. What is reused is decided by content alone.
"""

from collections import OrderedDict

from fabric.ids import AgentId, NodeName, TenantId
from router.limits import SESSIONS_MAX


class Sessions:
    """Node of each session's last turn; the oldest sessions are forgotten."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[TenantId, AgentId], NodeName] = OrderedDict()

    def note(self, tenant: TenantId, session: AgentId | None, node: NodeName) -> None:
        """Note a turn that a node has admitted."""
        if session is None:
            return
        self._nodes[tenant, session] = node
        self._nodes.move_to_end((tenant, session))
        if len(self._nodes) > SESSIONS_MAX:
            self._nodes.popitem(last=False)

    def nodes(self, tenant: TenantId, session: AgentId) -> tuple[NodeName, ...]:
        """Return the node of a session's last turn, if it is known."""
        node = self._nodes.get((tenant, session))
        return () if node is None else (node,)
