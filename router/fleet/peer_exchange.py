"""Exchange of peer lists: every node gets the names and addresses of its nearest peers.

    near   nodes from which it fetched recently, then those of its machine, of its networks,
           and any: before and after it by name, so that two nodes mostly measure each other

Only the router knows all addresses; nodes measure the links between them. Every call replaces the
earlier list, so a repeated or lost call does no harm. A node can reach others as well: a fetch
order includes the addresses of its source.
"""

import asyncio
import logging
import socket
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from fabric.control.node_calls import Done, NodeView
from fabric.errors import FabricError, RejectedError
from fabric.ids import NodeName
from fabric.limits import ADDRESSES_MAX
from fabric.net.links import (
    Address,
    AddressScope,
    LinkKind,
    PeerList,
    PeerNode,
    nominal_bytes_per_s,
)
from router.fleet.agent_activity import RecentPartners
from router.fleet.membership import Member, Membership
from router.limits import NODES_PER_STEP, PEER_LISTS_PER_STEP, PEERS_PER_NODE_MAX

_LOG = logging.getLogger("macfabric.router.peer_exchange")
NETWORK_BITS_ASSUMED = 24  # of a network of unknown size
Whereabouts = tuple[int, tuple[Address, ...]]  # incarnation and addresses of a node


class PeerExchange:
    """Peer lists last sent to each node, by its incarnation."""

    def __init__(self, membership: Membership, partners: RecentPartners) -> None:
        self._membership = membership
        self._partners = partners
        self._sent: dict[NodeName, tuple[int, PeerList]] = {}
        self._calls: dict[NodeName, asyncio.Task[None]] = {}
        self._present: dict[NodeName, Whereabouts] = {}
        self._neighbours = Neighbours()
        self._due: dict[NodeName, None] = {}  # nodes whose list may be out of date

    async def round(self) -> None:
        """Start a call to every node whose list is out of date; a hung node delays no other.

        Lists are made only after a node came, went or changed its addresses.
        """
        self._calls = {name: task for name, task in self._calls.items() if not task.done()}
        await self._note_changes()
        self._due |= dict.fromkeys(self._partners.changed & self._present.keys())
        self._partners.changed.clear()
        for number, name in enumerate(list(self._due)):
            if number % PEER_LISTS_PER_STEP == PEER_LISTS_PER_STEP - 1:
                await asyncio.sleep(0)
            member = self._membership.find(name)
            if name in self._calls or member is None:
                continue
            del self._due[name]
            incarnation, _ = self._present[name]
            call = self._neighbours.list_for(name, self._partners.of(name))
            if self._sent.get(name) != (incarnation, call):
                self._calls[name] = asyncio.create_task(self._send(member, incarnation, call))

    async def close(self) -> None:
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _note_changes(self) -> None:
        """Note the nodes that came, went or changed; then all lists may be out of date."""
        views = [view async for view in self._views_up()]
        present = {view.name: (view.incarnation, view.addresses) for view in views}
        if present == self._present:
            return
        for name in self._present.keys() - present.keys():
            self._neighbours.drop(name)
        changed = [view for view in views if self._present.get(view.name) != present[view.name]]
        for number, view in enumerate(changed):
            if number % PEER_LISTS_PER_STEP == PEER_LISTS_PER_STEP - 1:
                await asyncio.sleep(0)
            self._neighbours.put(view)
        self._present, self._due = present, dict.fromkeys(present)

    async def _views_up(self) -> AsyncIterator[NodeView]:
        """Yield the views of the nodes that are up; other tasks run in between."""
        for number, member in enumerate(self._membership.members):
            if number % NODES_PER_STEP == NODES_PER_STEP - 1:
                await asyncio.sleep(0)
            if member.view is not None and self._membership.is_up(member.name):
                yield member.view

    async def _send(self, member: Member, incarnation: int, call: PeerList) -> None:
        try:
            await member.link.call(call, Done)
        except RejectedError as error:  # an older node: a repetition would not help
            _LOG.warning("%s refuses its peer list: %s", member.name, error.message)
        except FabricError as error:
            _LOG.debug("%s did not receive its peer list: %s", member.name, error.code)
            if member.name in self._present:
                self._due[member.name] = None
            return
        self._sent[member.name] = (incarnation, call)


class Neighbours:
    """Present nodes by machine and by network, from which each node's nearest are taken."""

    def __init__(self) -> None:
        self._peers: dict[NodeName, PeerNode] = {}
        self._groups: dict[NodeName, list[object]] = {}  # of each node, the nearest first
        self._members: dict[object, list[NodeName]] = {}  # of each group, by name

    def put(self, view: NodeView) -> None:
        """Add a node, or replace its addresses."""
        self.drop(view.name)
        addresses = view.addresses[:ADDRESSES_MAX]
        self._peers[view.name] = PeerNode(view.name, view.incarnation, addresses)
        self._groups[view.name] = [("machine", view.host), *networks_of(addresses), "all"]
        for group in self._groups[view.name]:
            insort(self._members.setdefault(group, []), view.name)

    def drop(self, name: NodeName) -> None:
        """Remove a node, if it is there."""
        if self._peers.pop(name, None) is None:
            return
        for group in self._groups.pop(name):
            members = self._members[group]
            del members[bisect_left(members, name)]
            if not members:
                del self._members[group]

    def list_for(self, name: NodeName, partners: Iterable[NodeName] = ()) -> PeerList:
        """Return the list for one node: all others if they are few, or the nearest, by name.

        Nodes from which it fetched recently are among them.
        """
        nearest = {other: None for other in partners if other in self._peers}
        for group in self._groups[name]:
            for other in _around(self._members[group], name):
                nearest[other] = None
                if len(nearest) == PEERS_PER_NODE_MAX:
                    return self._list_of(nearest)
        return self._list_of(nearest)

    def _list_of(self, names: Iterable[NodeName]) -> PeerList:
        return PeerList(tuple(self._peers[name] for name in sorted(names)))


def networks_of(addresses: Sequence[Address]) -> list[tuple[LinkKind, str]]:
    """Return the networks that addresses are in, the fastest first."""
    networks: dict[tuple[LinkKind, str], int] = {}
    for address in addresses:
        if address.scope is not AddressScope.MACHINE:
            name = address.kind, network_of(address.host, address.prefix_bits)
            networks[name] = max(networks.get(name, 0), nominal_bytes_per_s(address))
    return sorted(networks, key=lambda name: -networks[name])


def network_of(host: str, prefix_bits: int) -> str:
    """Return the network of an IPv4 address in words; another address is a network of its own."""
    try:
        address = int.from_bytes(socket.inet_pton(socket.AF_INET, host), "big")
    except OSError:
        return host
    bits = prefix_bits or NETWORK_BITS_ASSUMED
    return f"{address >> (32 - bits)}/{bits}"


def _around(names: Sequence[NodeName], name: NodeName) -> Iterator[NodeName]:
    """Yield the other names of a sorted ring, those next to `name` on either side first."""
    at, count = bisect_left(names, name), len(names)
    for step in range(1, count // 2 + 1):
        yield names[(at + step) % count]
        if 2 * step != count:
            yield names[at - step]
