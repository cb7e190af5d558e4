"""A running node without its transports: its parts, as `node.assembly` has put them together."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from fabric.control.node_calls import NodeView, TierBytes
from fabric.ids import NodeName
from fabric.net.transfer_counts import FETCHING, SENDING, bounded
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.turn.prompt_limit import prompt_bytes_max
from node.agents.agent_table import AgentTable
from node.drain_flag import DrainFlag
from node.engine.engine_thread import EngineThread
from node.migration.copy_offers import CopySource
from node.migration.forks import ForkTarget
from node.migration.hibernation_export import Exports
from node.migration.hibernation_import import Imports
from node.migration.incoming import IncomingMoves
from node.migration.incoming_end import IncomingEnd
from node.migration.replicas import ReplicaTarget
from node.migration.source import MoveSource
from node.migration.span_source import SpanSource
from node.migration.span_target import SpanTarget
from node.migration.takeovers import Takeovers
from node.migration.target import IncomingCopies, MoveTarget
from node.migration.warm_up import WarmUp
from node.mlx.chat_tokenizer import ChatTokenizer
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.self_test import SelfTests
from node.store.agent_store import AgentStore
from node.store.scrubber import Scrubber
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.store.warm_start import WarmStart
from node.tiers.directive_store import DirectiveStore
from node.tiers.disk_budget import DiskBudget
from node.tiers.erasure import Erasing
from node.tiers.eviction import Eviction
from node.tiers.flusher import Flusher
from node.tiers.hot_tier import HotTier
from node.tiers.memory_pressure import MemoryPressure
from node.tiers.pins import Pinning
from node.tiers.prefetch import Prefetches
from node.tiers.unsaved import Unsaved
from node.transfer.server import TransferServer
from node.turn.turn import TurnServer
from node.upkeep import Retries, Upkeep


@dataclass(slots=True)
class HttpEndpoint:
    """Address of the node's HTTP server, once it listens."""

    url: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """What the transports hold; no part of it does. Its state lives on its event loop."""

    # What it stands on.
    identity: NodeIdentity
    clock: Clock
    endpoint: HttpEndpoint
    thermal_state: Callable[[], str]
    health: Health
    workers: Workers
    engine: EngineThread
    tokenizer: ChatTokenizer
    store: AgentStore
    erased: TombstoneStore
    service_time: ServiceTime
    transfers: TransferServer
    links: LinkTable
    connections: Connections
    # Memory and disk.
    table: AgentTable
    hot: HotTier
    pressure: MemoryPressure
    unsaved: Unsaved
    budget: DiskBudget
    eviction: Eviction
    flusher: Flusher
    prefetches: Prefetches
    erasing: Erasing
    pinning: Pinning
    directive_store: DirectiveStore
    # Agents that come and go.
    moves: IncomingMoves
    warm_up: WarmUp
    incoming_end: IncomingEnd
    copies: IncomingCopies
    target: MoveTarget
    source: MoveSource
    copy_source: CopySource
    replicas: ReplicaTarget
    takeovers: Takeovers
    forks: ForkTarget
    span_source: SpanSource
    span_target: SpanTarget
    exports: Exports
    imports: Imports
    # Turns, and what is done beside them.
    turns: TurnServer
    live_turns: LiveTurns
    self_tests: SelfTests
    upkeep: Upkeep
    retries: Retries
    scrubber: Scrubber
    warm_start: WarmStart
    drain_flag: DrainFlag

    @property
    def name(self) -> NodeName:
        return self.identity.name

    @property
    def has_work(self) -> bool:
        """Whether a turn runs, an agent is on its way here, or blocks are sent to a peer."""
        return bool(self.live_turns) or any(self.moves) or self.transfers.is_sending

    def view(self) -> NodeView:
        agents = [a for a in self.table if a.word.state is not OwnerState.REPLICA]
        config, model, engine = self.identity.config, self.identity.model, self.engine
        speed = engine.prefill_speed.per_s
        return NodeView(
            name=config.name,
            host=config.host,
            pid=os.getpid(),
            incarnation=config.incarnation,
            http_url=self.endpoint.url,
            model=model.name,
            fingerprint=model.fingerprint.hex(),
            context_tokens_max=model.context_tokens_max,
            state=self.health.state,
            agents=len(agents),
            tokens=sum(agent.manifest.tokens_count for agent in agents),
            bytes=TierBytes(hot=self.table.hot_bytes, disk=self.store.blocks.total_bytes),
            addresses=self.transfers.addresses(),
            waiting=engine.waiting_count,
            active=engine.active_count,
            queue_s=engine.queued_tokens / speed if speed else 0.0,
            prefill_tokens_per_s=speed,
            decode_tokens_per_s=engine.decode_speed.per_s,
            bytes_per_token=model.spec.bytes_per_token,
            self_test=self.self_tests.found,
            degraded=self.health.degraded,
            reuse=self.health.reuses,
            changes=self.table.changes,
            evicted_agents=self.budget.evicted_count,
            scrubbed_bytes=self.scrubber.scrubbed_bytes,
            damaged_blocks=self.store.blocks.damaged_count,
            free=TierBytes(
                hot=max(0, engine.budget.limit_bytes - self.table.hot_bytes),
                disk=self.budget.free_bytes,
            ),
            links=self.links.views(),
            erased=self.erased.fingerprint,
            fenced_turns=self.live_turns.fenced_count,
            failed_rounds=self.health.failed_rounds,
            sending=bounded(self.transfers.counts(), SENDING),
            fetching=bounded(self.connections.counts(), FETCHING),
            hot_limit_bytes=engine.budget.limit_bytes,
            hot_total_bytes=engine.budget.total_bytes,
            thermal_state=self.thermal_state(),
            memory_pressure=self.pressure.level.word,
            prompt_bytes_max=prompt_bytes_max(model.context_tokens_max, self.tokenizer.reach_bytes),
        )
