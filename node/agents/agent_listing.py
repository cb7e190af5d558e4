"""Lists of a node's agents for routers: whole, by changes, and in rows."""

from fabric.control.agent_at import AgentName
from fabric.control.change_calls import (
    COLUMNS,
    OTHER_COLUMNS,
    AgentChanges,
    AgentRow,
    ListChanges,
)
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.errors import RejectedError
from fabric.ids import NodeName
from node.agents.agent_table import AgentTable
from node.limits import LIST_BYTES_MAX

_VIEW_BYTES = 512  # approximate size of a listed agent without its sketch
_PIECE_BYTES = 9


def list_changes(
    name: NodeName, incarnation: int, table: AgentTable, call: ListChanges
) -> AgentChanges:
    """List the agents as `list_agents` does, in rows and without the pieces that the caller has."""
    if call.columns != COLUMNS:
        message = "this node lists agents in other columns; call list_agents"
        raise RejectedError(message, code=OTHER_COLUMNS)
    since = ListAgents(call.incarnation, call.since)
    listing = list_agents(name, incarnation, table, since, has_tails=True)
    return AgentChanges(
        incarnation,
        listing.changes,
        listing.since,
        tuple(map(AgentRow.of, listing.agents)),
        listing.gone or None,
        listing.more or None,
    )


def list_agents(
    name: NodeName,
    incarnation: int,
    table: AgentTable,
    call: ListAgents,
    *,
    has_tails: bool = False,
) -> AgentList:
    """Return the agents that changed after `call.since`; all if removals since then are unknown.

    With `has_tails`, a sketch lacks the pieces that the caller has since then.
    They are listed in the order of their last change, a bounded part at a time. An agent that
    changes meanwhile gets a later number and is listed again with a later part.
    """
    since = call.since if call.incarnation == incarnation else 0
    removals = table.removed_after(since)
    if removals is None:
        since, removals = 0, []
    sketches: list[AgentSketch] = []
    size_bytes, upto, more = 0, table.changes, False
    for change, agent in table.changed_after(since):
        sketch, prefix = agent.manifest.sketch, None
        count = table.kept_pieces(agent, since) if since and has_tails else 0
        if count:
            sketch, prefix = sketch[count:], (count, sketch[count - 1])
        size_bytes += _VIEW_BYTES + _PIECE_BYTES * len(sketch)
        if sketches and size_bytes > LIST_BYTES_MAX:
            more = True
            break
        form = agent.manifest.form
        digest = form.digest if form is not None else None
        sketches.append(AgentSketch(agent.view(), sketch, digest, prefix))
        upto = change
    upto = upto if more else table.changes
    names = tuple(AgentName(*key) for change, key in removals if change <= upto) if since else ()
    return AgentList(name, incarnation, upto, tuple(sketches), since, names, more)
