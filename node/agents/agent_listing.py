"""Tell the router which agents this node holds: all, or only what changed since it last asked.

Agents are told in the order of their last change, a bounded part at a time. What changes
meanwhile gets a later number and is told with a later part.
"""

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.ids import NodeName
from node.agents.agent_table import AgentTable
from node.limits import LIST_BYTES_MAX

_VIEW_BYTES = 512  # of an agent without its sketch, about
_PIECE_BYTES = 9


def list_agents(name: NodeName, incarnation: int, table: AgentTable, call: ListAgents) -> AgentList:
    """Answer with what is new after `call.since`; with everything where that cannot be told."""
    since = call.since if call.incarnation == incarnation else 0
    gone = table.gone_after(since)
    if gone is None:
        since, gone = 0, []
    told: list[AgentSketch] = []
    size_bytes, upto, more = 0, table.changes, False
    for change, agent in table.changed_after(since):
        size_bytes += _VIEW_BYTES + _PIECE_BYTES * len(agent.manifest.sketch)
        if told and size_bytes > LIST_BYTES_MAX:
            more = True
            break
        told.append(AgentSketch(agent.view(), agent.manifest.sketch))
        upto = change
    upto = upto if more else table.changes
    names = tuple(AgentName(*key) for change, key in gone if change <= upto) if since else ()
    return AgentList(name, incarnation, upto, tuple(told), since, names, more)
