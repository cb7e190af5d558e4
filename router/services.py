"""The router's parts, built once and shared by every API and background task."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fabric.control.term_calls import TermAnswer
from fabric.ids import DEFAULT_TENANT
from fabric.kvcache.hashing import agent_digest
from fabric.settings import RouterSettings
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.fleet import Fleet, NodeAccess
from router.fleet.node_client import NodeLink
from router.fleet.node_roster import NodeRoster, RosterStore
from router.fleet.peer_exchange import PeerExchange
from router.fleet.roster_keeper import RosterKeeper
from router.fleet.term_keeper import TermKeeper, VoterCall
from router.fresh_ids import later_life
from router.moves.drains import Drains
from router.moves.erasure_exchange import ErasureExchange
from router.moves.erasures import Erasures
from router.moves.forks import Forks
from router.moves.lost_owners import LostOwners
from router.moves.move_registry import MoveRegistry
from router.moves.prefetches import PrefetchRequests
from router.moves.prefix_seeding import PrefixSeeding
from router.moves.propagate import SettingsPropagation
from router.moves.recovery import Recovery
from router.moves.replicas import Replicas
from router.placement.placement import Placement
from router.telemetry import Telemetry
from router.turns.tenant_usage import UsageFile, UsageKeeper
from router.turns.turns import Turns

ALIAS_CHARS = 12  # of the digest that names an agent's record and tombstone on disk


@dataclass(frozen=True, slots=True)
class Services:
    """Services of a router, one of each kind."""

    fleet: Fleet
    telemetry: Telemetry
    moves: MoveRegistry
    recovery: Recovery
    erasures: Erasures
    erasure_exchange: ErasureExchange
    drains: Drains
    forks: Forks
    replicas: Replicas
    lost_owners: LostOwners
    propagation: SettingsPropagation
    prefix_seeding: PrefixSeeding
    prefetches: PrefetchRequests
    peer_exchange: PeerExchange
    roster_keeper: RosterKeeper
    turns: Turns
    usage_keeper: UsageKeeper
    terms: TermKeeper | None = None  # None: the fabric has one router

    async def run(self) -> None:
        """Run all background work until cancelled."""
        await self.roster_keeper.round()  # no epoch is given out before this life is stored
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.membership.run())
                tasks.create_task(self._sweep_queues())
                if self.terms is None:
                    for work in self._changes():
                        tasks.create_task(work)
                else:
                    tasks.create_task(self.terms.run())
                    tasks.create_task(self._run_while_active(self.terms))
                tasks.create_task(self.roster_keeper.run())
                tasks.create_task(self.usage_keeper.run())
        finally:
            if self.terms is not None:
                await self.terms.give_up()
            await self.drains.close()
            await self.prefetches.close()
            await self.replicas.close()
            await self.peer_exchange.close()
            await self.moves.close()
            await self.usage_keeper.store()

    def _changes(self) -> list[Coroutine[Any, Any, None]]:
        """Return the background work that changes the fabric."""
        return [self._run_rounds(), self.replicas.run(), self.prefix_seeding.run()]

    async def _run_while_active(self, terms: TermKeeper) -> None:
        """Change the fabric whenever this router is the active one."""
        while True:
            await terms.wait_for(active=True)
            tasks = [asyncio.create_task(work) for work in self._changes()]
            try:
                lost = asyncio.create_task(terms.wait_for(active=False))
                await asyncio.wait({lost, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # raises its error
            finally:
                for task in (lost, *tasks):
                    task.cancel()
                await asyncio.gather(lost, *tasks, return_exceptions=True)

    async def _sweep_queues(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.membership.heartbeat_s)
            self.turns.queues.sweep(self.fleet.is_up)

    async def _run_rounds(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.membership.heartbeat_s)
            await self.recovery.round()
            self.drains.sweep()
            await asyncio.sleep(0)  # in a fleet of 1,000 nodes each part takes milliseconds
            await self.peer_exchange.round()


def assemble(
    access: NodeAccess,
    settings: RouterSettings,
    cluster_key: bytes,
    placement: Placement | None = None,
    expected: ExpectedNodes | None = None,
    roster_store: RosterStore | None = None,
    usage_file: UsageFile | None = None,
) -> Services:
    """Build all parts of a router."""
    named = (*settings.api_keys, *settings.tenant_weights, *settings.tenant_limits)
    telemetry = Telemetry([*named, DEFAULT_TENANT])
    exchange = ErasureExchange(cluster_key, access.clock, telemetry, lambda: access.terms.is_active)
    stored = roster_store.read() if roster_store else NodeRoster()
    fleet = Fleet(
        access,
        floor=exchange.floor,
        catch_up=exchange,
        alias=lambda key: agent_digest(cluster_key, *key)[:ALIAS_CHARS],
        expected=expected or ExpectedNodes(settings.nodes_expected),
        life=later_life(stored.lives) if roster_store else 0,
    )
    terms = access.terms if isinstance(access.terms, TermKeeper) else None
    if terms is not None:
        terms.bind(fleet.life, lambda: _voters(fleet, access), fleet.begin_term)
    moves = MoveRegistry(fleet, telemetry)
    recovery = Recovery(fleet, moves, telemetry)
    replicas = Replicas(fleet, moves, telemetry, settings.replicas)
    prefetches = PrefetchRequests(fleet, moves, replicas, telemetry)
    turns = Turns(
        fleet,
        moves,
        recovery,
        telemetry,
        settings,
        placement or Placement(),
        prefetches,
    )
    return Services(
        fleet=fleet,
        telemetry=telemetry,
        moves=moves,
        recovery=recovery,
        erasures=Erasures(fleet, moves, replicas, exchange, cluster_key),
        erasure_exchange=exchange,
        drains=Drains(fleet, moves),
        forks=Forks(fleet, moves, telemetry),
        replicas=replicas,
        lost_owners=LostOwners(fleet, moves, telemetry),
        propagation=SettingsPropagation(fleet, replicas),
        prefix_seeding=PrefixSeeding(fleet, moves, telemetry),
        prefetches=prefetches,
        peer_exchange=PeerExchange(fleet.membership, fleet.partners),
        roster_keeper=RosterKeeper(fleet, roster_store, stored),
        turns=turns,
        usage_keeper=UsageKeeper(turns.accounts.usage, usage_file),
        terms=terms,
    )


def _voters(fleet: Fleet, access: NodeAccess) -> dict[str, VoterCall]:
    """Return the nodes and other voters that grant terms."""
    links = {member.name: member.link for member in fleet.membership.members}
    return {name: _voter(link) for name, link in (*links.items(), *access.voters.items())}


def _voter(link: NodeLink) -> VoterCall:
    return lambda call: link.call(call, TermAnswer)
