"""Move of one agent: copied while the source serves, sealed for the tail, committed by the target.

    source  ──offer──▶ copying ──seal──▶ sealed ───────────────────▶ released (replica)
    target             copy ───────────▶ commit: copy tail, own e+1 ──▶ owner
                        any failure before the commit: abort target, then source, which keeps
                        serving

The target's durable publish is the commit. If its answer is lost, the router asks the target.
Without an answer to that either, the source releases the agent at the next epoch: it becomes a
replica, which the agent's next turn takes over, above any commit that turns up later.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from fabric.control.node_calls import (
    NOTHING_COPIED,
    AbortMigration,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Done,
    Offer,
    OfferMigration,
    ReleaseAgent,
    SealAgent,
)
from fabric.errors import (
    CorruptDataError,
    FabricError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName
from fabric.record.manifest import OwnerState
from router.events import MoveChanged, MoveState
from router.fleet.agent_lists import read_list
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.fleet.node_http import Use
from router.limits import COPY_ROUNDS_MAX
from router.moves.retries import best_effort_call

_LOG = logging.getLogger("macfabric.router.migration")

BLOCK_GONE = "block_missing"  # error code of a block that a node does not have, or no longer
DAMAGED = CorruptDataError.code  # error code of a block whose bytes fail a check
MOVING = "agent_moving"
SEAL_WAIT_S = 300.0  # turns are handed over between steps, and a step may be a long chunk
SEAL_RETRY_S = 0.1
OUTCOME_POLL_S = 0.25
PROGRESS_S = 1.0  # between two reports of progress; heartbeats are as frequent
TAIL_BLOCKS = 1  # the seal follows a round of copying that sends no more than this


@dataclass(frozen=True, slots=True)
class MigrationReceipt:
    """Cost of a move; all zeros if the agent was on the target already."""

    agent: AgentId
    source: NodeName
    target: NodeName
    epoch: int
    blocks_sent: int = 0
    blocks_reused: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HandoverTarget:
    """The node that owns an agent at `epoch` once its move is committed."""

    migration: MigrationId
    node: NodeName
    epoch: int


class Migration:
    """Move in progress; `gate` is closed while no node may serve the agent."""

    def __init__(
        self,
        fleet: Fleet,
        name: MigrationId,
        key: AgentKey,
        holding: Holding,
        target: NodeName,
        *,
        verify: bool = False,
    ) -> None:
        """Plan a move; with `verify`, the source verifies its blocks first."""
        self.gate = asyncio.Event()
        self.gate.set()
        self._fleet = fleet
        self._name = name
        self._key = key
        self._holding = holding
        self._source = fleet.link(holding.node)
        self._target = fleet.link(target)
        self._epoch = fleet.move_epoch(key, holding)
        self._verify = verify
        self._started_s = fleet.clock.monotonic_s()
        self._sealed_s = 0.0
        stored_bytes = holding.view.bytes.disk if holding.view is not None else 0
        self.progress = MoveChanged(
            key, name, holding.node, target, MoveState.COPYING, bytes_total=stored_bytes
        )
        self._is_live = False  # a turn ran while the agent was copied
        self.is_committed = False  # valid once the gate is open again
        self.commit_sent = asyncio.Event()  # set also if it never will be
        self._is_undecided = False  # a commit was sent, and its outcome is unknown

    async def run(self) -> MigrationReceipt:
        """Move the agent; raise a FabricError after undoing everything."""
        self._publish(MoveState.COPYING)
        try:
            first = await self._copy_ahead()
            if self._is_live:
                await self._make_ready()
            tail = await self._commit(await self._seal())
        except BaseException as error:
            await asyncio.shield(self._abort())
            self._publish(MoveState.FAILED, code=getattr(error, "code", "cancelled"))
            raise
        else:
            self.is_committed = True
        finally:
            self.commit_sent.set()
            self.gate.set()
        committed_s = self._fleet.clock.monotonic_s()
        self._note_owner()
        self._publish(MoveState.COMMITTED, tail)
        await self._release(self._target.name)
        return MigrationReceipt(
            agent=self._key[1],
            source=self._source.name,
            target=self._target.name,
            epoch=self._epoch,
            blocks_sent=first.blocks_sent + tail.blocks_sent,
            # The tail's offer lists every block; those of the first copy were not reused.
            blocks_reused=max(0, tail.blocks_reused - first.blocks_sent),
            bytes_sent=first.bytes_sent + tail.bytes_sent,
            seconds=committed_s - self._started_s,
            pause_seconds=committed_s - self._sealed_s,
        )

    @property
    def handover_target(self) -> HandoverTarget | None:
        """Node that will serve the agent after the handover; None unless it is in progress."""
        if self.gate.is_set():
            return None
        return HandoverTarget(self._name, self._target.name, self._epoch)

    def _publish(
        self, state: MoveState, copied: Copied = NOTHING_COPIED, code: str | None = None
    ) -> None:
        """Note and publish the move's progress."""
        sent_bytes = self.progress.bytes_sent + copied.bytes_sent
        self.progress = replace(
            self.progress,
            state=state,
            blocks_sent=self.progress.blocks_sent + copied.blocks_sent,
            bytes_sent=sent_bytes,
            bytes_total=max(sent_bytes, self.progress.bytes_total),
            seconds=self._fleet.clock.monotonic_s() - self._started_s,
            code=code,
        )
        self._fleet.events.publish(self.progress)

    async def _offer(self) -> Offer:
        call = OfferMigration(
            *self._key, self._holding.epoch, self._name, self._target.name, self._verify
        )
        self._verify = False  # once
        return await self._source.call(call, Offer)

    async def _copy_ahead(self) -> Copied:
        """Copy while the agent serves, and repeat while much is new."""
        offer, total = await self._copy_offered()
        self._is_live = offer.live
        blocks, rounds = total.blocks_sent, 1
        while offer.live and blocks > TAIL_BLOCKS and rounds < COPY_ROUNDS_MAX:
            offer, more = await self._copy_offered()
            blocks, rounds = more.blocks_sent, rounds + 1
            total = replace(
                total,
                blocks_sent=total.blocks_sent + more.blocks_sent,
                bytes_sent=total.bytes_sent + more.bytes_sent,
            )
        return total

    async def _make_ready(self) -> None:
        """Open connections ahead for the calls during the pause and for the resumed turn."""
        await asyncio.gather(
            self._source.make_ready(Use.CALL), self._target.make_ready(Use.CALL, Use.STREAM)
        )

    async def _copy_offered(self) -> tuple[Offer, Copied]:
        """Copy the offered blocks; renew the offer if a turn that ends replaces one."""
        for _ in range(COPY_ROUNDS_MAX):
            offer = await self._offer()
            try:
                return offer, await self._copy(offer)
            except FabricError as error:
                if error.code != BLOCK_GONE:
                    raise
        message = "the agent's KV cache changes faster than it can be copied"
        raise RetryLaterError(message, retry_after_s=2.0, code="agent_busy")

    async def _copy(self, offer: Offer) -> Copied:
        self._fleet.partners.note(self._source.name, self._target.name)
        call = CopyBlocks(self._name, self._source.name, offer)
        watching = asyncio.create_task(self._watch_copy())
        try:
            copied = await self._target.call(call, Copied)
        finally:
            watching.cancel()
        self._publish(MoveState.COPYING, copied)
        return copied

    async def _watch_copy(self) -> None:
        """Publish what the target's heartbeats report of its fetches, while it copies.

        It may fetch other agents as well, so this is an estimate, and at most the whole agent.
        """
        before_bytes, shown = self._fetched_bytes(), self.progress
        while True:
            await asyncio.sleep(PROGRESS_S)
            sent_bytes = self.progress.bytes_sent + self._fetched_bytes() - before_bytes
            sent_bytes = min(sent_bytes, self.progress.bytes_total)
            if sent_bytes > shown.bytes_sent:
                now_s = self._fleet.clock.monotonic_s()
                shown = replace(
                    self.progress, bytes_sent=sent_bytes, seconds=now_s - self._started_s
                )
                self._fleet.events.publish(shown)

    def _fetched_bytes(self) -> int:
        member = self._fleet.membership.find(self._target.name)
        view = member.view if member is not None else None
        return view.fetching.get("bytes", 0) if view is not None else 0

    async def _seal(self) -> Offer:
        call = SealAgent(*self._key, self._holding.epoch, self._name, self._target.name)
        deadline_s = self._fleet.clock.monotonic_s() + SEAL_WAIT_S
        self.gate.clear()
        while True:
            self._sealed_s = self._fleet.clock.monotonic_s()
            try:
                final = await self._source.call(call, Offer)
            except RetryLaterError as busy:
                # A turn has not reached its next token yet. Another move is not waited for.
                is_over = self._fleet.clock.monotonic_s() >= deadline_s
                if is_over or busy.code == MOVING:
                    raise
                await asyncio.sleep(min(busy.retry_after_s, SEAL_RETRY_S))
            else:
                self._publish(MoveState.SEALED)
                return final

    async def _commit(self, final: Offer) -> Copied:
        """Make the target copy the tail and own the agent; return the tail's cost, if known."""
        if self._fleet.directory.issued_epoch(self._key) >= self._epoch:
            message = "another node became the agent's owner meanwhile"
            raise StaleEpochError(message)
        self._fleet.directory.promise(self._key, self._epoch)
        call = CommitMigration(self._name, self._source.name, final, self._epoch)
        self._is_undecided = True
        asyncio.get_running_loop().call_soon(self.commit_sent.set)  # after the call below
        try:
            committed = await self._target.call(call, Committed)
        except FabricError as error:
            _LOG.warning("migration %s: the commit failed: %s", self._name, error.code)
            if not await self._was_committed():
                raise
            return NOTHING_COPIED
        return committed.copied

    async def _was_committed(self) -> bool:
        """Ask the target until it answers or its lease expires."""
        while self._fleet.is_up(self._target.name):
            try:
                return await self._decide()
            except (NodeLostError, RetryLaterError):  # the latter if it is starting again
                await asyncio.sleep(OUTCOME_POLL_S)
        return False

    async def _decide(self) -> bool:
        """Ask the target whether it has committed, and have it forget the migration if not."""
        has_committed = await self._target_owns()
        if not has_committed:
            # Once it has forgotten the migration, it refuses a late commit.
            await self._target.call(self._abort_call(), Done)
            has_committed = await self._target_owns()
        self._is_undecided = False
        return has_committed

    async def _target_owns(self) -> bool:
        listed = await read_list(self._target)
        return any(
            item.view.key == self._key
            and item.view.epoch >= self._epoch
            and item.view.state is not OwnerState.REPLICA
            for item in listed.agents
        )

    def _abort_call(self) -> AbortMigration:
        return AbortMigration(*self._key, self._name)

    async def _abort(self) -> None:
        # The target first: the source must not serve again while a commit can still happen.
        if not self._is_undecided:
            await best_effort_call(self._target, self._abort_call())
            await best_effort_call(self._source, self._abort_call())
            return
        has_committed = False
        with suppress(FabricError):
            has_committed = await self._decide()
        if has_committed:
            self._note_owner()
            await self._release(self._target.name)
        elif self._is_undecided:
            await self._release_source()
        else:
            await best_effort_call(self._source, self._abort_call())

    async def _release_source(self) -> None:
        """Make the source a replica at the epoch that the target may own; its data stays."""
        _LOG.warning("migration %s: the outcome of the commit is unknown", self._name)
        await self._release(self._source.name)

    async def _release(self, owner: NodeName) -> None:
        # Recorded only once it is confirmed. If the call is lost, the source's claim stays listed,
        # so that recovery finds it and repeats the call. If the source's disk refuses the write,
        # its list shows the release anyway.
        call = ReleaseAgent(*self._key, self._epoch, self._name, owner)
        if await best_effort_call(self._source, call):
            self._note(self._source.name, self._epoch, OwnerState.REPLICA)

    def _note_owner(self) -> None:
        self._note(self._target.name, self._epoch, OwnerState.OWNED)

    def _note(self, node: NodeName, epoch: int, state: OwnerState) -> None:
        self._fleet.note_holding(self._key, node, epoch, state, self._holding.group)
