"""Planted faults in storing and applying directives."""

from dataclasses import replace
from unittest.mock import patch

from fabric.edit_mode import EditMode
from fabric.record import directed_messages as conversations
from node.agents.agent_table import AgentTable
from node.migration import copy_targets
from node.migration.incoming import IncomingMoves
from node.migration.target import IncomingCopies
from node.prompt import directed_request
from node.tiers.directive_store import DirectiveStore
from node.turn.claim import Claims


def directives_are_never_written():
    """What an agent is told is acknowledged, and only memory has it."""

    async def publish(self, agent, record, **_):
        agent.manifest = record
        self.records.put(agent)

    return patch.object(DirectiveStore, "_publish", publish)


def moves_leave_directives_behind():
    """An agent comes without what it was told to where it goes."""
    offered = IncomingCopies.decode_offer
    return patch.object(
        IncomingCopies,
        "decode_offer",
        lambda self, raw: replace(offered(self, raw), directives=None),
    )


def forks_forget_directives():
    """A fork begins with the memory alone."""
    anew = copy_targets.owned_anew
    return patch.object(
        copy_targets,
        "owned_anew",
        lambda record, *more: replace(anew(record, *more), directives=None),
    )


def undone_directives_still_apply():
    """Whoever takes a directive back is shown that it is gone, and it is not."""
    changed = DirectiveStore._change_directives

    async def direct(self, agent, call):
        if call.added or call.spans:
            return await changed(self, agent, call)
        return self._changed(agent.manifest, call)

    return patch.object(DirectiveStore, "_change_directives", direct)


def waiting_turns_keep_old_directives():
    """A turn that waited for its agent is rendered as that was told when the turn came."""
    known, directives = {}, Claims.directives

    def as_before(self, request):
        return known.setdefault((id(self), request.operation), directives(self, request))

    return patch.object(Claims, "directives", as_before)


def the_older_directive_wins():
    """Of two directives for one message the one that was there first holds."""
    concerning = conversations._concerning

    def reverse(message, found):
        return concerning(message, [(-order, each) for order, each in found])

    return patch.object(conversations, "_concerning", reverse)


def no_agent_forgets():
    """What lies behind a message is kept, whatever its directive says."""

    def kept(wished, matched):
        return EditMode.AMORTIZE if matched else wished

    return patch.object(directed_request, "_edit_mode", kept)


def closed_agents_stay_hot():
    """Who is closed or evicted keeps its hot memory."""
    return patch.object(DirectiveStore, "_drop_resident", lambda self, agent: None)


def closing_is_never_written():
    """What is said of an agent as a whole is in memory only."""

    async def publish(self, agent, record, *, revokes):
        if record.directives == agent.manifest.directives:
            agent.manifest = record
            return
        await written(self, agent, record, revokes=revokes)

    written = DirectiveStore._publish
    return patch.object(DirectiveStore, "_publish", publish)


def private_memory_is_lent():
    """Who is for itself alone is no exception when others' blocks are looked for."""
    return patch.object(AgentTable, "has_private", lambda self, agent: False)


def private_moves_are_lent():
    """What arrives of an agent for itself alone serves others until the move is committed."""
    return patch.object(IncomingMoves, "has_unrecorded_blocks", lambda self, tenant: False)


DIRECTIVE_PLANTS = (
    private_memory_is_lent,
    private_moves_are_lent,
    directives_are_never_written,
    moves_leave_directives_behind,
    forks_forget_directives,
    undone_directives_still_apply,
    waiting_turns_keep_old_directives,
    the_older_directive_wins,
    no_agent_forgets,
    closed_agents_stay_hot,
    closing_is_never_written,
)
