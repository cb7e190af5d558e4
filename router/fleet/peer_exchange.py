"""Exchange of peer lists: every node gets the names and addresses of the others.

Only the router knows all addresses; nodes measure the links between them. Every call replaces the
earlier list, so a repeated or lost call does no harm.
"""

import asyncio
import logging

from fabric.control.node_calls import Done
from fabric.errors import FabricError, RejectedError
from fabric.ids import NodeName
from fabric.limits import ADDRESSES_MAX, PEERS_MAX
from fabric.net.links import PeerList, PeerNode
from router.fleet.membership import Member, Membership

_LOG = logging.getLogger("macfabric.router.peer_exchange")


class PeerExchange:
    """Peer lists last sent to each node, by its incarnation."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sent: dict[NodeName, tuple[int, PeerList]] = {}
        self._calls: dict[NodeName, asyncio.Task[None]] = {}

    async def round(self) -> None:
        """Start a call to every node whose list is out of date; a hung node delays no other."""
        self._calls = {name: task for name, task in self._calls.items() if not task.done()}
        for member in self._present():
            call = self.call_for(member)
            view = member.view
            assert view is not None, "present"
            if self._sent.get(member.name) == (view.incarnation, call):
                continue
            if member.name not in self._calls:
                work = self._send(member, view.incarnation, call)
                self._calls[member.name] = asyncio.create_task(work)

    async def close(self) -> None:
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def call_for(self, member: Member) -> PeerList:
        """Return the list for one node: all others that are not lost, by name."""
        others = [m.view for m in self._present() if m.name != member.name and m.view is not None]
        return PeerList(
            tuple(
                PeerNode(view.name, view.incarnation, view.addresses[:ADDRESSES_MAX])
                for view in others[:PEERS_MAX]
            )
        )

    def _present(self) -> list[Member]:
        return [
            member
            for member in self._membership.members
            if member.view is not None and self._membership.is_up(member.name)
        ]

    async def _send(self, member: Member, incarnation: int, call: PeerList) -> None:
        try:
            await member.link.call(call, Done)
        except RejectedError as error:  # an older node: a repetition would not help
            _LOG.warning("%s refuses its peer list: %s", member.name, error.message)
        except FabricError as error:
            _LOG.debug("%s did not receive its peer list: %s", member.name, error.code)
            return
        self._sent[member.name] = (incarnation, call)
