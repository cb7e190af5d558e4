"""A node without its transports: its parts in groups, as `node.assembly` builds them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric import CONTROL_VERSION, CONTROL_VERSION_MIN, PROTOCOL_VERSION
from fabric.control.node_calls import THERMAL_STATES, NodeView, TierBytes
from fabric.control.usage_view import ExitView, UsageView
from fabric.ids import NodeName
from fabric.net.links import LinkView
from fabric.net.wire import FETCHING, SENDING, limit_names
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.turn.prompt_plan import prompt_bytes_max
from node.agents.agent_table import AgentTable
from node.agents.owned import OwnedAgents
from node.drain_flag import DrainFlag
from node.engine.engine_thread import EngineThread
from node.folder_return import FolderReturn
from node.migration.copy_targets import ForkTarget, ReplicaTarget
from node.migration.hibernation_export import Exports
from node.migration.hibernation_import import Imports
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.ownership import OwnershipReleases, Takeovers
from node.migration.prefix_source import SharedPrefixSource
from node.migration.prefix_target import SharedPrefixTarget
from node.migration.record_offers import CopySource
from node.migration.source import MoveSource
from node.migration.target import IncomingCopies, MoveTarget
from node.migration.warm_up import WarmUp
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import build_versions
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.self_test import SelfTests
from node.store.agent_store import AgentStore
from node.store.data_folders import DataFolders
from node.store.granted_terms import GrantedTerms
from node.store.scrubber import Scrubber
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.store.warm_start import WarmStart
from node.system_sleep import SystemSleep
from node.tiers.agent_records import AgentRecords, RecordMending
from node.tiers.directive_store import DirectiveStore
from node.tiers.disk_budget import DiskBudget
from node.tiers.erasure import Erasing
from node.tiers.eviction import Eviction
from node.tiers.flusher import Flusher
from node.tiers.hot_tier import HotTier, Unsaved
from node.tiers.memory_pressure import MemoryGauge, MemoryPressure
from node.tiers.pins import Pinning, Pins
from node.tiers.prefetch import Prefetches
from node.tiers.record_writer import RecordWriters
from node.tiers.restore import Restores
from node.tiers.span_leases import SpanLeases
from node.transfer.client import TransferReport, fetch_blocks
from node.transfer.peer_calls import AskNode
from node.transfer.server import TransferServer
from node.turn.lent_heads import HeadLenders
from node.turn.turn import TurnServer
from node.upkeep import Retries, Upkeep


@dataclass(slots=True)
class HttpEndpoint:
    """Address of the node's HTTP server, once it listens."""

    url: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class NodeResources:
    """Resources of a node, which differ between a Mac and a simulation."""

    identity: NodeIdentity
    clock: Clock
    engine: EngineThread
    tokenizer: ChatTokenizer
    store: AgentStore
    table: AgentTable
    erased: TombstoneStore
    transfers: TransferServer
    service_time: ServiceTime
    workers: Workers
    thermal_state: Callable[[], str] = lambda: THERMAL_STATES[0]
    gauge: MemoryGauge = field(default_factory=MemoryGauge)
    endpoint: HttpEndpoint = field(default_factory=HttpEndpoint)
    folders: DataFolders | None = None  # None: they cannot vanish while it runs
    fetch: Callable[..., TransferReport] = fetch_blocks  # of a peer's blocks; blocks its thread
    ask: AskNode | None = None  # calls another node; None: over the data plane
    usage: Callable[[], UsageView | None] = lambda: None
    last_exit: ExitView | None = None
    certificate_ends_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tiers:
    """Agents in RAM and on disk."""

    owned: OwnedAgents
    unsaved: Unsaved
    hot: HotTier
    eviction: Eviction
    leases: SpanLeases
    budget: DiskBudget
    writers: RecordWriters
    records: AgentRecords
    mending: RecordMending
    pins: Pins
    flusher: Flusher
    restores: Restores
    prefetches: Prefetches


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves and copies of agents to and from other nodes."""

    incoming: IncomingMoves
    warm_up: WarmUp
    cleanup: IncomingCleanup
    copies: IncomingCopies
    target: MoveTarget
    source: MoveSource
    releases: OwnershipReleases
    copy_source: CopySource
    replicas: ReplicaTarget
    takeovers: Takeovers
    forks: ForkTarget
    prefix_source: SharedPrefixSource
    prefix_target: SharedPrefixTarget
    exports: Exports
    imports: Imports


@dataclass(frozen=True, slots=True)
class AgentCommands:
    """Commands about single agents: erasures, pins, directives."""

    erasing: Erasing
    pinning: Pinning
    directive_store: DirectiveStore


@dataclass(frozen=True, slots=True)
class Background:
    """Background work of a node."""

    self_tests: SelfTests
    pressure: MemoryPressure
    upkeep: Upkeep
    retries: Retries
    folders: FolderReturn
    scrubber: Scrubber
    warm_start: WarmStart
    drain_flag: DrainFlag
    sleep: SystemSleep


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A whole node without its transports; its state changes on its event loop only."""

    resources: NodeResources
    health: Health
    live_turns: LiveTurns
    terms: GrantedTerms
    links: LinkTable
    connections: Connections
    tiers: Tiers
    moves: Moves
    commands: AgentCommands
    turns: TurnServer
    lenders: HeadLenders
    background: Background

    @property
    def name(self) -> NodeName:
        return self.resources.identity.name

    @property
    def has_work(self) -> bool:
        """Whether a turn runs, an agent is arriving, or blocks are being sent to a peer."""
        moving = any(self.moves.incoming) or self.resources.transfers.is_sending
        return bool(self.live_turns) or moving

    def view(self, links: tuple[LinkView, ...] = ()) -> NodeView:
        """Return the node's state, with its links if they are given."""
        has, budget, background = self.resources, self.tiers.budget, self.background
        agents = [a for a in has.table if a.effective_record.state is not OwnerState.REPLICA]
        config, model, engine = has.identity.config, has.identity.model, has.engine
        speed = engine.prefill_speed.per_s
        return NodeView(
            name=config.name,
            host=config.host,
            pid=os.getpid(),
            incarnation=config.incarnation,
            http_url=has.endpoint.url,
            model=model.name,
            fingerprint=model.fingerprint.hex(),
            context_tokens_max=model.context_tokens_max,
            state=self.health.state,
            agents=len(agents),
            tokens=sum(agent.manifest.tokens_count for agent in agents),
            bytes=TierBytes(hot=has.table.hot_bytes, disk=has.store.blocks.total_bytes),
            addresses=has.transfers.addresses(),
            waiting=engine.waiting_count,
            active=engine.active_count,
            queue_s=engine.queued_tokens / speed if speed else 0.0,
            prefill_tokens_per_s=speed,
            decode_tokens_per_s=engine.decode_speed.per_s,
            bytes_per_token=model.spec.bytes_per_token,
            self_test=background.self_tests.found,
            degraded=self.health.degraded,
            reuse=self.health.reuses,
            changes=has.table.changes,
            evicted_agents=budget.evicted_count,
            scrubbed_bytes=background.scrubber.scrubbed_bytes,
            damaged_blocks=has.store.blocks.damaged_count,
            free=TierBytes(
                hot=max(0, engine.budget.limit_bytes - has.table.hot_bytes),
                disk=budget.free_bytes,
            ),
            links=links,
            erased=has.erased.fingerprint,
            fenced_turns=self.live_turns.fenced_count,
            failed_rounds=self.health.failed_rounds,
            sending=limit_names(has.transfers.counts(), SENDING),
            fetching=limit_names(self.connections.counts(), FETCHING),
            hot_limit_bytes=engine.budget.limit_bytes,
            hot_total_bytes=engine.budget.total_bytes,
            thermal_state=has.thermal_state(),
            memory_pressure=background.pressure.level.word,
            sampling=model.sampling or None,
            prompt_bytes_max=prompt_bytes_max(model.context_tokens_max, has.tokenizer.reach_bytes),
            template_warning=has.tokenizer.warning,
            router=self.terms.view,
            protocol=PROTOCOL_VERSION,
            control=CONTROL_VERSION,
            control_min=CONTROL_VERSION_MIN,
            build=build_versions(),
            usage=has.usage(),
            last_exit=has.last_exit,
            certificate_ends_s=has.certificate_ends_s,
            restore_bytes_per_s=self.tiers.restores.bytes_per_s,
            dropped_caches=has.table.dropped_count,
            failed_saves=self.tiers.unsaved.failed_count,
            preempted_turns=engine.preempted_count,
        )
