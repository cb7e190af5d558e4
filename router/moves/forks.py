"""Forks: new agents with another agent's context, on any node that runs its model."""

import logging

from fabric.control.replica_calls import KeepFork
from fabric.errors import ConflictError, FabricError, RetryLaterError
from fabric.ids import AgentId, AgentKey, NodeName, OperationId
from fabric.record.manifest import OwnerState
from router.events import AgentForked
from router.fleet import snapshots
from router.fleet.fleet import Fleet
from router.moves.copier import CopyReceipt, copy_agent
from router.moves.move_registry import MoveRegistry
from router.placement.agent_moves import destination
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.forks")


class Forks:
    """Forks of agents to a chosen node, under a name reserved meanwhile."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._moves = moves
        self._telemetry = telemetry

    async def fork(
        self, key: AgentKey, name: AgentId, to: str | None, operation: OperationId
    ) -> CopyReceipt:
        """Fork an agent; raise ConflictError if the name is taken.

        Raises RetryLaterError while an awaited node may have an agent of that name.
        """
        await self._fleet.membership.refresh(relist=True)
        new = (key[0], name)
        receipt = self._find_receipt(new, operation)
        if receipt is not None:
            return receipt
        await self._moves.wait_until_served(key)
        self._check_free(new)
        target = self._target(key, to)
        self._fleet.discovery.require_reports(name)
        epoch = max(1, self._fleet.begin_epoch(new))
        # Keeps a first turn under this name from starting another agent meanwhile.
        reservation = self._fleet.directory.reserve(new, target, epoch)
        reservation.turns_count += 1
        try:
            receipt = await copy_agent(
                self._fleet,
                key,
                target,
                lambda migration, raw: KeepFork(migration, raw, operation, name, epoch),
            )
        except FabricError:
            self._telemetry.note_copy("fork", 0, ok=False)
            raise
        finally:
            self._fleet.directory.release(new, reservation)
        self._telemetry.note_copy("fork", receipt.bytes_sent, ok=True)
        self._note(new, receipt)
        self._fleet.events.publish(AgentForked(new, key[1], receipt.target))
        return receipt

    def _find_receipt(self, new: AgentKey, operation: OperationId) -> CopyReceipt | None:
        """Return the receipt of an earlier fork by the same operation, if there is one."""
        for holding in self._fleet.directory.holdings(new):
            view = holding.view
            if view is not None and view.migration is not None and str(view.migration) == operation:
                node = holding.node
                return CopyReceipt(new[1], node, node, view, 0, view.blocks, 0, 0.0)
        return None

    def _check_free(self, new: AgentKey) -> None:
        directory = self._fleet.directory
        if directory.unerased_holdings(new) or directory.reservation(new):
            message = f"agent {new[1]!r} exists already: choose another name, or erase it"
            raise ConflictError(message, code="agent_exists", param="as")

    def _target(self, key: AgentKey, to: str | None) -> NodeName:
        owner = self._fleet.require_owner(key)
        takes = {view.name for view in self._fleet.ready()}
        if to is not None:
            return self._fleet.require_accepting(to)
        if owner.node in takes:
            return owner.node
        ship = destination(snapshots.of_agent(self._fleet, key))
        if ship is None:
            message = f"{owner.node} takes no new agents, and no other node can take the fork"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        return ship.target

    def _note(self, new: AgentKey, receipt: CopyReceipt) -> None:
        view = receipt.view
        self._fleet.note_holding(new, receipt.target, view.epoch, OwnerState.OWNED, view=view)
        _LOG.info("agent %s was forked on %s", self._fleet.alias(new), receipt.target)
