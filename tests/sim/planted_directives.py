"""Planted faults in storing and applying directives."""

from dataclasses import replace

from fabric.edit_mode import EditMode
from fabric.record import directed_messages as conversations
from node.agents.agent_table import AgentTable
from node.migration import copy_targets
from node.migration.incoming import IncomingMoves
from node.migration.target import IncomingCopies
from node.prompt import directed_request
from node.tiers.directive_store import DirectiveStore
from node.turn.claim import Claims
from tests.sim.replaced import replaced


def directives_are_never_written():
    """Directives are acknowledged, and kept in memory only."""

    async def publish(self, agent, record, **_):
        agent.manifest = record
        self.records.put(agent)

    return replaced(DirectiveStore, "_publish", publish)


def moves_leave_directives_behind():
    """An agent migrates without its directives."""
    offered = IncomingCopies.decode_offer
    return replaced(
        IncomingCopies,
        "decode_offer",
        lambda self, raw: replace(offered(self, raw), directives=None),
    )


def forks_forget_directives():
    """A fork begins with the memory alone."""
    anew = copy_targets.with_new_owner
    return replaced(
        copy_targets,
        "with_new_owner",
        lambda record, *more: replace(anew(record, *more), directives=None),
    )


def undone_directives_still_apply():
    """An undone directive is no longer listed, and still applies."""
    changed = DirectiveStore._change_directives

    async def direct(self, agent, call):
        if call.added or call.spans:
            return await changed(self, agent, call)
        return self._changed(agent.manifest, call)

    return replaced(DirectiveStore, "_change_directives", direct)


def waiting_turns_keep_old_directives():
    """A turn that waited for its agent is rendered with the directives of its arrival."""
    known, directives = {}, Claims.directives

    def as_before(self, request):
        return known.setdefault((id(self), request.operation), directives(self, request))

    return replaced(Claims, "directives", as_before)


def the_older_directive_wins():
    """Of two directives for one message the older one applies."""
    concerning = conversations._directives_for

    def reverse(message, found):
        return concerning(message, [(-order, each) for order, each in found])

    return replaced(conversations, "_directives_for", reverse)


def no_agent_forgets():
    """Rows after a message are kept, even if its directive forgets them."""

    def kept(requested, matched):
        return EditMode.AMORTIZE if matched else requested

    return replaced(directed_request, "_edit_mode", kept)


def closed_agents_stay_hot():
    """Closed and evicted agents keep their hot caches."""
    return replaced(DirectiveStore, "_drop_resident", lambda self, agent: None)


def closing_is_never_written():
    """Settings of an agent are kept in memory only."""

    async def publish(self, agent, record, *, revokes):
        if record.directives == agent.manifest.directives:
            agent.manifest = record
            return
        await written(self, agent, record, revokes=revokes)

    written = DirectiveStore._publish
    return replaced(DirectiveStore, "_publish", publish)


def private_memory_is_lent():
    """Blocks of private agents are shared like others."""
    return replaced(AgentTable, "has_private", lambda self, agent: False)


def private_moves_are_lent():
    """Arriving blocks of a private agent serve others until the move is committed."""
    return replaced(IncomingMoves, "has_unrecorded_blocks", lambda self, tenant: False)


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
