"""Registry of moves in progress: one per agent at a time."""

import asyncio
import logging

from fabric.errors import (
    ConflictError,
    FabricError,
    RetryElsewhereError,
    RetryLaterError,
)
from fabric.hosting.tracing import span
from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.record.manifest import OwnerState
from router.events import MoveChanged
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_migration
from router.moves.migration import DAMAGED, HandoverTarget, Migration, MigrationReceipt
from router.moves.retries import as_client_error, with_fresh_owner
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.moves")

SETTLE_WAIT_S = 60.0


class MoveRegistry:
    """Moves in progress, by agent."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._running: dict[AgentKey, Migration | None] = {}
        self._tasks: set[asyncio.Task[MigrationReceipt]] = set()

    def is_moving(self, key: AgentKey) -> bool:
        return key in self._running

    def progress(self) -> tuple[MoveChanged, ...]:
        """Return the progress of every move that has started."""
        return tuple(move.progress for move in self._running.values() if move is not None)

    async def handover_target(self, key: AgentKey) -> HandoverTarget | None:
        """Return where a sealed agent will be served, unless its move fails.

        Waits until the commit was sent, so that a turn arrives at the target after it.
        """
        migration = self._running.get(key)
        handover_target = migration.handover_target if migration is not None else None
        if migration is not None and handover_target is not None:
            await migration.commit_sent.wait()
        return handover_target

    async def wait_for_handover(self, key: AgentKey, handover_target: HandoverTarget) -> bool:
        """Wait for the end of a move; return whether it was committed."""
        migration = self._running.get(key)
        if migration is None or migration.handover_target != handover_target:
            return False
        await migration.gate.wait()
        return migration.is_committed

    @property
    def is_idle(self) -> bool:
        return not self._running

    def require_not_moving(self, key: AgentKey) -> None:
        if key in self._running:
            message = f"agent {key[1]} is being moved; try again when the move has ended"
            raise ConflictError(message, code="migration_in_progress")

    async def wait_until_served(self, key: AgentKey) -> None:
        """Wait while no node may serve the agent; raise RetryLaterError after SETTLE_WAIT_S."""
        migration = self._running.get(key)
        if migration is None:
            return
        try:
            async with asyncio.timeout(SETTLE_WAIT_S):
                await migration.gate.wait()
        except TimeoutError:
            message = "the agent is being moved to another node; retry later"
            raise RetryLaterError(message, retry_after_s=2.0, code="agent_moving") from None

    async def migrate(
        self, tenant: TenantId, agent: AgentId, to: str, *, holds: bool = True
    ) -> MigrationReceipt:
        """Move an agent; the move continues if the caller is cancelled.

        With `holds`, placement leaves it on its new node, which a client has chosen.
        """
        target = self._fleet.require_node(to)
        key = (tenant, agent)
        self.require_not_moving(key)
        self._running[key] = None
        task = asyncio.create_task(self._run(key, target, holds=holds))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Abort all moves in progress, so that every source serves again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[MigrationReceipt]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            # The caller may be gone, so log it here.
            _LOG.info("a move failed: %s", getattr(error, "code", type(error).__name__))

    async def _run(self, key: AgentKey, target: NodeName, *, holds: bool) -> MigrationReceipt:
        try:
            await self._fleet.membership.refresh()
            try:
                receipt = await with_fresh_owner(self._fleet, lambda: self._attempt(key, target))
            except FabricError as error:
                if error.code != DAMAGED:
                    raise
                _LOG.warning(
                    "a block of an agent arrived damaged: its node verifies all its blocks"
                )
                receipt = await self._attempt(key, target, verify=True)
        except RetryElsewhereError as error:
            self._telemetry.migrations.labels("aborted").inc()
            raise as_client_error(error) from None
        except FabricError:
            self._telemetry.migrations.labels("aborted").inc()
            raise
        finally:
            del self._running[key]
        if holds:
            self._fleet.activity.hold(key, target)
        if receipt.source != receipt.target:
            self._telemetry.note_migration(
                receipt.seconds, receipt.pause_seconds, receipt.bytes_sent
            )
        return receipt

    async def _attempt(
        self, key: AgentKey, target: NodeName, *, verify: bool = False
    ) -> MigrationReceipt:
        holding = self._owner(key)
        if holding.node == target:
            return MigrationReceipt(key[1], target, target, holding.epoch)
        if not self._fleet.is_alive(holding.node):
            message = f"node {holding.node}, which owns agent {key[1]!r}, is not answering"
            raise RetryLaterError(message, retry_after_s=2.0, code="node_lost")
        self._fleet.require_accepting(target)
        name = fresh_migration()
        migration = Migration(self._fleet, name, key, holding, target, verify=verify)
        self._running[key] = migration
        alias = self._fleet.alias(key)
        _LOG.info("agent %s moves from %s to %s", alias, holding.node, target)
        with span("move", agent=alias, source=holding.node, target=target) as move_span:
            receipt = await migration.run()
            move_span.note(bytes=receipt.bytes_sent, pause_s=receipt.pause_seconds)
        return receipt

    def _owner(self, key: AgentKey) -> Holding:
        holding = self._fleet.require_owner(key)
        if holding.state is OwnerState.SEALED:
            message = "an earlier move of this agent is still undecided; retry later"
            raise RetryLaterError(message, retry_after_s=2.0, code="agent_moving")
        return holding
