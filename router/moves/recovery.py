"""Recovery of ownership that a lost router, node or message left undecided.

    two claims       the highest epoch keeps the agent, the others become replicas; of equal ones,
                     which a failing disk can leave, the one with more turns keeps it
    sealed, alone    resumed at the source, once its target cannot own a higher epoch

If the target does not answer, or the migration's id is unknown, the source releases the agent at
the next epoch instead, and the agent's next turn takes it over, above any late commit.
"""

import logging

from fabric.control.node_calls import AbortMigration, AgentView, Done, ReleaseAgent
from fabric.errors import UNDECIDED, FabricError
from fabric.ids import AgentKey, MigrationId, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_migration
from router.limits import LEASE_S
from router.moves.move_registry import MoveRegistry
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.recovery")


class Recovery:
    """Decisions about agents in doubt, once per heartbeat and when a turn needs one."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._moves = moves
        self._telemetry = telemetry
        self._since_s = fleet.clock.monotonic_s()

    async def round(self) -> None:
        """Resolve every agent in doubt that can be resolved now."""
        doubts = self._fleet.directory.undecided_agents()
        if doubts:
            self._telemetry.recovery_rounds.inc()
        for key in doubts:
            await self.resolve(key)

    async def resolve(self, key: AgentKey) -> None:
        """Decide one agent's ownership, if that is possible yet."""
        if self._moves.is_moving(key):
            return
        try:
            await self._release_others(key)
            owner = self._fleet.directory.owner(key)
            member = self._fleet.membership.find(owner.node) if owner else None
            if member and owner and owner.state is OwnerState.SEALED:
                # Its state may have changed by itself.
                await self._fleet.membership.heartbeat(member)
                owner = self._fleet.directory.owner(key)
            if owner and owner.state is OwnerState.SEALED:
                await self._resume(key, owner)
        except FabricError as error:
            _LOG.info(
                "agent %s: cannot decide an interrupted move yet: %s",
                self._fleet.alias(key),
                error.code,
            )

    async def _release_others(self, key: AgentKey) -> None:
        owner = self._fleet.directory.owner(key)
        if owner is None or not self._fleet.is_alive(owner.node):
            return
        for holding in self._fleet.directory.unerased_holdings(key):
            claims = holding.state is not OwnerState.REPLICA
            if claims and holding.node != owner.node and self._fleet.is_up(holding.node):
                alias = self._fleet.alias(key)
                _LOG.info(
                    "agent %s: %s gives its ownership up to %s", alias, holding.node, owner.node
                )
                # A node releases an agent to a higher epoch only: if theirs is equal, it gets the
                # next epoch, which is then never given out.
                epoch = max(owner.epoch, holding.epoch + 1)
                self._fleet.directory.bar_epoch(key, epoch)
                move = _migration_of(holding.view) or fresh_migration()
                call = ReleaseAgent(*key, epoch, move, owner.node)
                await self._fleet.link(holding.node).call(call, Done)
                self._telemetry.resolved.labels("gave_way").inc()
                self._note(key, epoch, holding, OwnerState.REPLICA)

    async def _resume(self, key: AgentKey, sealed: Holding) -> None:
        if not self._fleet.is_up(sealed.node):
            return
        target = sealed.view.sealed_to if sealed.view else None
        named = _migration_of(sealed.view)
        migration = named or fresh_migration()
        is_decided = target is None or target == sealed.node
        if target is not None and target != sealed.node:
            if not await self._target_cannot_own(key, sealed, target):
                return
            if self._fleet.is_up(target):
                # From here on, the target refuses a late commit.
                is_decided = await self._abort_at_target(target, AbortMigration(*key, migration))
                if not await self._target_cannot_own(key, sealed, target):
                    return
        alias = self._fleet.alias(key)
        _LOG.info("agent %s: %s resumes after an undecided move", alias, sealed.node)
        self._telemetry.resolved.labels("decided").inc()
        source = self._fleet.link(sealed.node)
        if named and is_decided:
            await source.call(AbortMigration(*key, migration), Done)
            self._note(key, sealed.epoch, sealed, OwnerState.OWNED)
        else:
            epoch = sealed.epoch + 1
            await source.call(ReleaseAgent(*key, epoch, migration, sealed.node), Done)
            self._note(key, epoch, sealed, OwnerState.REPLICA)

    async def _abort_at_target(self, target: NodeName, call: AbortMigration) -> bool:
        """Abort the move at the target; return whether it certainly has not committed."""
        try:
            await self._fleet.link(target).call(call, Done)
        except FabricError as error:
            if error.code != UNDECIDED:
                raise
            return False
        return True

    async def _target_cannot_own(self, key: AgentKey, sealed: Holding, target: NodeName) -> bool:
        member = self._fleet.membership.find(target)
        if member is None:
            # The router may not have found it yet: wait for one lease.
            return self._fleet.clock.monotonic_s() - self._since_s >= LEASE_S
        if not self._fleet.is_up(target):
            return True
        requested_s = self._fleet.clock.monotonic_s()
        await self._fleet.membership.heartbeat(member)
        if member.view is None or member.heartbeat_s < requested_s or member.listed != member.state:
            return False
        owner = self._fleet.directory.owner(key)
        return owner is not None and owner.epoch <= sealed.epoch

    def _note(self, key: AgentKey, epoch: int, holding: Holding, state: OwnerState) -> None:
        self._fleet.note_holding(key, holding.node, epoch, state, holding.group)


def _migration_of(view: AgentView | None) -> MigrationId | None:
    """Return the migration for which a node sealed the agent, by its own report."""
    return view.migration if view is not None else None
