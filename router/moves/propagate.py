"""Propagation of changes of an agent's settings to its replicas, before their acknowledgement.

    owner     writes the change into its record
    replicas  receive that record, or are dropped

A replica on an absent node receives it later. If that node, or one without a replica, takes the
agent over before, the turn itself carries the privacy settings that the router knows.
"""

import asyncio
import logging
from dataclasses import dataclass

from fabric.control.directive_calls import ChangeSettings, DirectAgent
from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import DropReplica
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding, settings_fingerprint
from router.fleet.fleet import Fleet
from router.limits import SUSPECT_S
from router.moves.replicas import Replicas
from router.moves.retries import best_effort_call

_LOG = logging.getLogger("macfabric.router.propagate")


@dataclass(frozen=True, slots=True)
class SettingsPropagation:
    """Changes of agents' settings at the owner and at every replica."""

    fleet: Fleet
    replicas: Replicas

    async def apply(self, call: DirectAgent | ChangeSettings) -> AgentView:
        """Send a change to the owner, then to its replicas; raise the owner's error.

        Raises RetryLaterError if a replica is out of date; repeating the call is safe.
        """
        async with self.replicas.changing_settings(call.key):
            view = await self.fleet.ask_owner(call)
            if call.may_revoke:
                await self._share_tombstones(view.node)
            self.fleet.directory.note_settings(call.key, view)
            stale = self._stale_replicas(call.key, view)
            await asyncio.gather(*(self._refresh(call.key, replica) for replica in stale))
        return view

    async def _share_tombstones(self, owner: NodeName) -> None:
        """Make every node drop the shared prefixes of an agent that became private or forgot.

        The owner's tombstones list them: its heartbeat reports them, and the heartbeats of other
        nodes pass them on. A node that does not answer gets them before its next lease.
        """
        membership = self.fleet.membership
        member = membership.find(owner)
        if member is not None:
            await membership.heartbeat(member)
        await membership.refresh(SUSPECT_S)

    def _stale_replicas(self, key: AgentKey, owned: AgentView) -> list[Holding]:
        """Return the replicas whose settings differ from the owner's."""
        latest = settings_fingerprint(owned)
        return [
            holding
            for holding in self.fleet.directory.unerased_holdings(key)
            if holding.node != owned.node and holding.state is OwnerState.REPLICA
            if holding.view is None or settings_fingerprint(holding.view) != latest
        ]

    async def _refresh(self, key: AgentKey, replica: Holding) -> None:
        """Renew a replica or drop it; raise RetryLaterError if neither succeeds."""
        if not self.fleet.is_up(replica.node):
            return  # it is renewed later, and a takeover before carries the privacy settings
        try:
            await self.replicas.refresh(key, replica)
        except FabricError as error:
            alias, node = self.fleet.alias(key), replica.node
            _LOG.info("agent %s: the settings did not reach %s: %s", alias, node, error.code)
            if not await best_effort_call(self.fleet.link(node), DropReplica(*key)):
                message = f"the replica on {node} has not received the change; try again"
                raise RetryLaterError(message, code="copy_unaware") from None
