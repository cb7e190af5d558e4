"""The router's parts, built once and shared by every API and background task."""

import asyncio
from dataclasses import dataclass

from fabric.kvcache.hashing import agent_digest
from fabric.settings import RouterSettings
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.fleet import Fleet, NodeAccess
from router.fleet.node_roster import NodeRoster, RosterStore
from router.fleet.peer_exchange import PeerExchange
from router.fleet.roster_keeper import RosterKeeper
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

    async def run(self) -> None:
        """Run all background work until cancelled."""
        await self.roster_keeper.round()  # no epoch is given out before this life is stored
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.membership.run())
                tasks.create_task(self._tend())
                tasks.create_task(self.replicas.run())
                tasks.create_task(self.prefix_seeding.run())
                tasks.create_task(self.roster_keeper.run())
        finally:
            await self.drains.close()
            await self.prefetches.close()
            await self.replicas.close()
            await self.peer_exchange.close()
            await self.moves.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.membership.heartbeat_s)
            await self.recovery.round()
            self.drains.sweep()
            await self.peer_exchange.round()


def assemble(
    access: NodeAccess,
    settings: RouterSettings,
    cluster_key: bytes,
    placement: Placement | None = None,
    expected: ExpectedNodes | None = None,
    roster_store: RosterStore | None = None,
) -> Services:
    """Build all parts of a router."""
    telemetry = Telemetry()
    exchange = ErasureExchange(cluster_key, access.clock, telemetry)
    stored = roster_store.read() if roster_store else NodeRoster()
    fleet = Fleet(
        access,
        floor=exchange.floor,
        catch_up=exchange,
        alias=lambda key: agent_digest(cluster_key, *key)[:ALIAS_CHARS],
        expected=expected or ExpectedNodes(settings.nodes_expected),
        life=later_life(stored.lives) if roster_store else 0,
    )
    moves = MoveRegistry(fleet, telemetry)
    recovery = Recovery(fleet, moves, telemetry)
    replicas = Replicas(fleet, moves, telemetry, settings.replicas)
    prefetches = PrefetchRequests(fleet, moves, replicas, telemetry)
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
        turns=Turns(
            fleet,
            moves,
            recovery,
            telemetry,
            settings.takeover_after_s,
            placement or Placement(),
            prefetches.hint,
            moves_agents=settings.moves_idle_agents,
        ),
    )
