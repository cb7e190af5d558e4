"""Directive store: add, undo and list an agent's directives, which its record holds.

One atomic write stores all directives of a request; the next turn applies them to the cache.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from fabric.control.directive_calls import (
    ChangeSettings,
    DirectAgent,
    DirectiveView,
    MemoryView,
    MessageView,
    ReadMemory,
    directive_view,
)
from fabric.control.node_calls import AgentView, Done, DropResident
from fabric.control.replica_calls import DropReplica
from fabric.errors import ConflictError, RejectedError, RetryLaterError
from fabric.ids import AgentKey
from fabric.limits import DIRECTIVES_MAX
from fabric.record.directive import (
    Directive,
    is_to_forget,
    live_directives,
    texts_bytes,
    undone_directives,
)
from fabric.record.manifest import AgentSettings, Manifest, OwnerState, unless_default
from fabric.record.message_positions import MessagePosition, MessagePositions
from fabric.record.spans import Spans, tokens_of
from node.agents.agent import Agent
from node.agents.owned import OwnedAgents
from node.limits import DIRECTIVES_BYTES_MAX
from node.tiers.agent_records import AgentRecords, RecordMending, despite_losses
from node.tiers.erasure import Erasing
from node.tiers.eviction import Eviction
from node.tiers.flusher import Flusher

TURN_WAIT_S = 30.0  # for a running turn, which a new directive does not affect


@dataclass(frozen=True, slots=True)
class DirectiveStore:
    """Handlers of the directive calls; `marks` are the template's special tokens."""

    owned: OwnedAgents
    records: AgentRecords
    mending: RecordMending
    flusher: Flusher
    marks: frozenset[int]
    eviction: Eviction
    erasing: Erasing

    async def change_directives(self, call: DirectAgent) -> AgentView:
        """Change an agent's directives; raise RejectedError, DiskError, or an error of `require`.

        A repeated operation gets the same answer.
        """
        for directive in call.added:
            if problem := directive.problem():
                raise RejectedError(problem, code="invalid_message")
        async with self.erasing.revoking(), self._hold_agent(call.key) as agent:
            directives = await despite_losses(lambda: self._change_directives(agent, call))
        return replace(agent.view(), directives=_views(agent.manifest, live_directives(directives)))

    async def change_settings(self, call: ChangeSettings) -> AgentView:
        """Change an agent's settings; raises the same errors as `change_directives`."""
        async with self.erasing.revoking(), self._hold_agent(call.key) as agent:
            await despite_losses(lambda: self._change_settings(agent, call))
            if call.closes:
                self._drop_resident(agent)
        return agent.view()

    async def drop_resident(self, call: DropResident) -> AgentView:
        """Free an agent's resident cache; raise ConflictError unless all of it is on disk."""
        async with self._hold_agent(call.key) as agent:
            if agent.saved is None or not agent.is_durable:
                message = "the agent's last turn is not on disk yet; retry later"
                raise ConflictError(message, code="nothing_saved")
            self._drop_resident(agent)
        return agent.view()

    async def drop_replica(self, call: DropReplica) -> Done:
        """Evict a replica; raise ConflictError if this node owns the agent, or DiskError."""
        agent = self.owned.table.get(call.key)
        if agent is None:
            return Done("this node has no copy")
        if agent.effective_record.state is not OwnerState.REPLICA:
            message = "this node owns the agent: its disk may have the only copy"
            raise ConflictError(message, code="only_copy")
        self.eviction.offers.withdraw_agent(call.key)  # left from a finished move
        if not await self.eviction.evict([agent]):
            message = "the copy is in use; retry later"
            raise RetryLaterError(message, code="agent_busy")
        return Done("evicted")

    def _drop_resident(self, agent: Agent) -> None:
        if agent.is_durable:
            agent.cache = None
            self.records.put(agent)

    async def read_memory(self, call: ReadMemory) -> MemoryView:
        """List an agent's messages and directives; raises the errors of `OwnedAgents.require`."""
        record = self.owned.require(call.key).manifest
        positions = record.positions or MessagePositions(())
        return MemoryView(
            record.tokens_count,
            tuple(_message(record, number, m) for number, m in enumerate(positions.messages)),
            _views(record, live_directives(record.directives)),
            _views(record, undone_directives(record.directives)),
        )

    @asynccontextmanager
    async def _hold_agent(self, key: AgentKey) -> AsyncIterator[Agent]:
        """Hold an agent's turn lock, after saving its unsaved turns."""
        agent = self.owned.require(key)
        if agent.is_unsaved:
            await self.flusher.flush()
        async with agent.turn_lock.held(TURN_WAIT_S):
            self.owned.recheck(agent)
            yield agent

    async def _change_directives(self, agent: Agent, call: DirectAgent) -> tuple[Directive, ...]:
        await self.mending.mend(agent)
        before = agent.manifest.directives or ()
        after = await self.records.workers.run(
            lambda: self._changed_directives(agent.manifest, call)
        )
        if len(live_directives(after)) > DIRECTIVES_MAX:
            message = f"an agent may have at most {DIRECTIVES_MAX} directives: undo some"
            raise ConflictError(message, code="too_many_directives")
        if texts_bytes(after) > max(DIRECTIVES_BYTES_MAX, texts_bytes(before)):
            message = (
                f"an agent's directives may have {DIRECTIVES_BYTES_MAX} bytes of text: undo some"
            )
            raise ConflictError(message, code="too_many_directives")
        if after != before:
            # Branches may contain text that the directives drop.
            record = replace(agent.manifest, directives=after or None, branches=None)
            forgets = is_to_forget(d for d in live_directives(after) if d not in before)
            await self._publish(agent, record, revokes=forgets)
        return after

    async def _change_settings(self, agent: Agent, call: ChangeSettings) -> None:
        await self.mending.mend(agent)
        before, record = agent.manifest.settings, agent.manifest
        after = _changed_settings(before or AgentSettings(), call)
        if after is not None and (problem := after.problem()):
            raise RejectedError(problem, code="invalid_message")
        if call.closes and record.pinned:  # closing an agent unpins it
            agent.manifest = record = replace(record, pinned=False)
        if after != before or (agent.saved is not None and agent.saved.pinned != record.pinned):
            hides = after is not None and after.is_private and not agent.manifest.is_private
            await self._publish(agent, replace(record, settings=after), revokes=hides)

    async def _publish(self, agent: Agent, record: Manifest, *, revokes: bool) -> None:
        """Store the changed record; with `revokes`, drop the rows that others borrowed from it."""
        if agent.saved is None or not agent.is_durable:
            message = "the agent's last turn is not on disk yet"
            raise ConflictError(message, code="nothing_saved")
        record = replace(record, revision=record.revision + 1)
        if revokes:
            await self.erasing.revoke(record)
            record = replace(record, series=f"{record.epoch}.{record.revision}")
        await self.records.publish(record, agent.saved)
        agent.take_record(record)
        self.records.put(agent)

    def _changed_directives(self, record: Manifest, call: DirectAgent) -> tuple[Directive, ...]:
        """Return the directives after a call, with those that it undoes marked."""
        before = record.directives or ()
        removed = (
            {d.operation for d in live_directives(before)} if call.removes_all else {*call.removed}
        )
        kept = tuple(d for d in live_directives(before) if d.operation not in removed)
        taken_back = tuple(
            replace(d, undone_s=call.now_s, replacement=None)
            for d in live_directives(before)
            if d.operation in removed
        )
        # A repeated or late call does not add an undone directive again.
        known_operations = {d.operation for d in (*kept, *undone_directives(before))}
        added = [d for d in call.added if d.operation not in known_operations]
        salt = self.records.store.salt(record.tenant)
        placing = Spans(record, self.marks, salt)
        for directive in added:
            placing.check_known(directive)
        spans = [span for span in call.spans if span.operation not in known_operations]
        if spans:
            record = replace(record, directives=(*kept, *added) or None)
            added += Spans(record, self.marks, salt).directives(spans)
        past = undone_directives((*undone_directives(before), *taken_back))
        return (*past, *kept, *added)


def _changed_settings(known: AgentSettings, call: ChangeSettings) -> AgentSettings | None:
    requested = {
        "rebuilds": call.rebuilds,
        "is_closed": call.closes,
        "is_private": call.is_private,
    }
    changed = {name: value for name, value in requested.items() if value is not None}
    settings = replace(known, **changed)
    if call.decays is not None:
        settings = replace(settings, decays_after_s=call.decays_after_s if call.decays else None)
    return unless_default(settings)


def _views(record: Manifest, directives: Sequence[Directive]) -> tuple[DirectiveView, ...]:
    """Return views of directives, with the numbers of their messages."""
    numbers: dict[tuple[bytes, int], int] = {}
    counts: dict[bytes, int] = {}
    for number, position in enumerate(
        record.positions.messages if record.positions is not None else ()
    ):
        nth = counts.get(position.digest, 0)
        counts[position.digest] = nth + 1
        numbers[position.digest, nth] = number
    return tuple(
        directive_view(d, numbers.get((d.message_digest or b"", d.nth or 0))) for d in directives
    )


def _message(record: Manifest, number: int, position: MessagePosition) -> MessageView:
    start, end = tokens_of(record, position)
    is_known = position.start is not None
    return MessageView(
        number,
        position.role,
        position.chars,
        start if is_known else None,
        end if is_known else None,
        position.is_edited,
    )
