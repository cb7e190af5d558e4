"""Propagate changes of an agent's settings to its replicas before acknowledging them.

    owner     writes the change into its record
    replicas  receive that record, or are dropped

A replica on an absent node receives it later. If that node, or one without a replica, takes the
agent over before, the turn itself carries the privacy settings that the router has heard of.
"""

import asyncio
import logging
from dataclasses import dataclass

from fabric.control.directive_calls import DirectAgent, DropReplica, WishOfAgent
from fabric.control.node_calls import AgentView
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fleet.words import words_of
from router.limits import SUSPECT_S
from router.moves.attempts import told
from router.moves.replicas import Replicas

_LOG = logging.getLogger("macfabric.router.telling")


@dataclass(frozen=True, slots=True)
class Telling:
    """Tells agents something, wherever there is anything of them."""

    fleet: Fleet
    replicas: Replicas

    async def tell(self, call: DirectAgent | WishOfAgent) -> AgentView:
        """Have the owner carry out a call, and its copies hear of it; raise as the owner does.

        Raises RetryLaterError where a copy did not: said again, the owner changes nothing.
        """
        async with self.replicas.telling(call.key):
            view = await self.fleet.ask_owner(call)
            if call.may_revoke:
                await self._spread(view.node)
            self.fleet.directory.note_words(call.key, view)
            copies = self._behind(call.key, view)
            await asyncio.gather(*(self._refresh(call.key, copy) for copy in copies))
        return view

    async def _spread(self, owner: NodeName) -> None:
        """Have every node drop what it borrowed of an agent that forgot or is private now.

        The owner's tombstones say so: a heartbeat learns them, and the others' heartbeats pass
        them on. A node that does not answer learns them before its next lease.
        """
        membership = self.fleet.membership
        member = membership.find(owner)
        if member is not None:
            await membership.heartbeat(member)
        await membership.refresh(SUSPECT_S)

    def _behind(self, key: AgentKey, owned: AgentView) -> list[Holding]:
        """List the copies that were not told all that the owner was."""
        held = [each for each in self.fleet.directory.living(key) if each.node != owned.node]
        copies = [each for each in held if each.state is OwnerState.REPLICA]
        return [c for c in copies if c.view is None or words_of(c.view) != words_of(owned)]

    async def _refresh(self, key: AgentKey, copy: Holding) -> None:
        """Have a copy hear it, or go; raise RetryLaterError where it does neither."""
        if not self.fleet.is_up(copy.node):
            return  # its next copy has it, and whoever takes it over is told whom it is for
        try:
            await self.replicas.refresh(key, copy)
        except FabricError as error:
            alias = self.fleet.alias(key)
            _LOG.info("agent %s: %s did not hear what it is told: %s", alias, copy.node, error.code)
            if not await told(self.fleet.link(copy.node), DropReplica(*key)):
                message = f"the copy on {copy.node} has not heard it yet; say it again"
                raise RetryLaterError(message, code="copy_unaware") from None
