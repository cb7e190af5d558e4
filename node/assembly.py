"""Put a node together: the one place where its parts meet.

Each part is given the few others that it works with, and none the whole. What a node is built
on differs between a Mac and a simulation; the rest is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.control.node_calls import THERMAL_STATES
from fabric.ports import Clock
from node.agents.agent_table import AgentTable
from node.agents.owned import OwnedAgents
from node.drain_flag import DrainFlag
from node.engine.engine_thread import EngineThread
from node.grammar.compiler import Compiler, TokenizerFacts
from node.migration.copy_offers import CopySource
from node.migration.fetching import Fetching
from node.migration.forks import ForkTarget
from node.migration.hibernation_export import Exports
from node.migration.hibernation_import import Imports
from node.migration.incoming import IncomingMoves
from node.migration.incoming_end import IncomingEnd
from node.migration.kept_copies import KeptCopies
from node.migration.offers import Offers
from node.migration.replicas import ReplicaTarget
from node.migration.source import MoveSource
from node.migration.span_source import SpanSource
from node.migration.span_target import SpanTarget
from node.migration.step_downs import StepDowns
from node.migration.takeovers import Takeovers
from node.migration.target import IncomingCopies, MoveTarget
from node.migration.warm_up import WarmUp
from node.mlx.chat_tokenizer import ChatTokenizer
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.node import HttpEndpoint, Node
from node.prompt.answer_grammars import AnswerGrammars
from node.prompt.encoder_threads import EncoderThreads
from node.prompt.pipeline import PromptPipeline
from node.prompt.prompt_boundaries import PromptBoundaries
from node.prompt.prompt_encoder import PromptEncoder
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.self_test import Questions, SelfTests
from node.store.agent_store import AgentStore
from node.store.model_folders import folder_name
from node.store.scrubber import Scrubber
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.store.warm_start import WarmStart
from node.tiers.agent_records import AgentRecords
from node.tiers.agent_removal import AgentRemoval
from node.tiers.derived_memory import DerivedMemory
from node.tiers.directive_store import DirectiveStore
from node.tiers.disk_budget import DiskBudget
from node.tiers.disk_tier import DiskSurvey
from node.tiers.erased_folders import ErasedFolders
from node.tiers.erasure import Erasing
from node.tiers.eviction import Eviction
from node.tiers.flusher import Flusher
from node.tiers.hot_tier import HotTier
from node.tiers.memory_pressure import MemoryGauge, MemoryPressure
from node.tiers.other_folders import OtherFolders
from node.tiers.pins import Pinning, Pins
from node.tiers.prefetch import Prefetches
from node.tiers.record_mending import RecordMending
from node.tiers.record_writer import RecordWriters
from node.tiers.span_leases import SpanLeases
from node.tiers.unsaved import Unsaved
from node.transfer.client import TransferReport, fetch_blocks
from node.transfer.server import TransferServer
from node.turn.borrowed_spans import BorrowedSpans
from node.turn.claim import Claims
from node.turn.edited_prefix import EditedPrefixes
from node.turn.prefix import Prefixes
from node.turn.saver import Savers
from node.turn.turn import TurnServer
from node.turn.turn_sequence import Sequences
from node.upkeep import Retries, Upkeep


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What a node is built on."""

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
    fetch: Callable[..., TransferReport] = fetch_blocks  # brings blocks from a peer; blocks


@dataclass(frozen=True, slots=True)
class _Tiers:
    """Memory and disk."""

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
    prefetches: Prefetches


@dataclass(frozen=True, slots=True)
class _Moves:
    """Agents that come and go."""

    moves: IncomingMoves
    warm_up: WarmUp
    incoming_end: IncomingEnd
    copies: IncomingCopies
    target: MoveTarget
    source: MoveSource
    step_downs: StepDowns
    copy_source: CopySource
    replicas: ReplicaTarget
    takeovers: Takeovers
    forks: ForkTarget
    span_source: SpanSource
    span_target: SpanTarget
    exports: Exports
    imports: Imports


def assemble(ground: Ground) -> Node:
    """Build a node of which nothing runs yet; call it on, or before, its event loop."""
    identity, clock, engine, store = ground.identity, ground.clock, ground.engine, ground.store
    table, workers, settings = ground.table, ground.workers, identity.settings
    health = Health(identity.name, identity.model.problem)
    links, connections = LinkTable(clock), Connections()
    live_turns = LiveTurns(health)
    tiers = _tiers(ground, health)
    moves = _moves(ground, health, tiers, links, connections)
    erasing = _erasing(ground, health, tiers, moves.incoming_end)
    turns = _turns(ground, health, tiers, moves, live_turns)
    questions = Questions(identity, ground.tokenizer, workers, turns)
    self_tests = SelfTests(clock, tiers.records, questions, live_turns, health)
    upkeep = Upkeep(
        tiers.budget, tiers.pins, moves.incoming_end, store, workers, ground.service_time, health
    )
    return Node(
        identity=identity,
        clock=clock,
        endpoint=ground.endpoint,
        thermal_state=ground.thermal_state,
        health=health,
        workers=workers,
        engine=engine,
        tokenizer=ground.tokenizer,
        store=store,
        erased=ground.erased,
        service_time=ground.service_time,
        transfers=ground.transfers,
        links=links,
        connections=connections,
        table=table,
        hot=tiers.hot,
        unsaved=tiers.unsaved,
        pressure=MemoryPressure(ground.gauge, engine, tiers.hot, clock, health.note_failed_round),
        budget=tiers.budget,
        eviction=tiers.eviction,
        flusher=tiers.flusher,
        prefetches=tiers.prefetches,
        erasing=erasing,
        pinning=Pinning(tiers.owned, tiers.pins, upkeep.round),
        directive_store=_directive_store(ground, tiers, erasing),
        moves=moves.moves,
        warm_up=moves.warm_up,
        incoming_end=moves.incoming_end,
        copies=moves.copies,
        target=moves.target,
        source=moves.source,
        copy_source=moves.copy_source,
        replicas=moves.replicas,
        takeovers=moves.takeovers,
        forks=moves.forks,
        span_source=moves.span_source,
        span_target=moves.span_target,
        exports=moves.exports,
        imports=moves.imports,
        turns=turns,
        live_turns=live_turns,
        self_tests=self_tests,
        upkeep=upkeep,
        retries=_retries(ground, health, tiers, moves, erasing, self_tests),
        scrubber=Scrubber(settings, clock, workers, store.blocks, live_turns, health),
        warm_start=WarmStart(workers, store.blocks, live_turns, health),
        drain_flag=DrainFlag(identity.config.data_dir, workers, health),
    )


def _retries(
    ground: Ground,
    health: Health,
    tiers: _Tiers,
    moves: _Moves,
    erasing: Erasing,
    self_tests: SelfTests,
) -> Retries:
    return Retries(
        erasing,
        ground.store,
        ground.workers,
        tiers.unsaved,
        tiers.flusher,
        moves.step_downs,
        self_tests,
        health,
    )


def _tiers(ground: Ground, health: Health) -> _Tiers:
    store, table, workers, engine = ground.store, ground.table, ground.workers, ground.engine
    settings, offers = ground.identity.settings, ground.transfers.offers
    owned = OwnedAgents(table, ground.erased)
    unsaved = Unsaved(table, health)
    hot = HotTier(table, engine, unsaved)
    eviction = Eviction(table, store, workers, offers, hot)
    survey = DiskSurvey(table, store, workers, offers, engine, settings.disk_bytes)
    others = OtherFolders(ground.identity, ground.clock, workers, ground.service_time)
    leases = SpanLeases(ground.clock, store.blocks, ground.erased)
    budget = DiskBudget(settings, table, store, workers, survey, eviction, others, leases)
    writers = RecordWriters(store, workers, engine, budget)
    records = AgentRecords(table, store, workers, hot)
    mending = RecordMending(records, writers)
    return _Tiers(
        owned=owned,
        unsaved=unsaved,
        hot=hot,
        eviction=eviction,
        leases=leases,
        budget=budget,
        writers=writers,
        records=records,
        mending=mending,
        pins=Pins(records, mending),
        flusher=Flusher(table, unsaved, writers, hot),
        prefetches=Prefetches(owned, store, workers, engine, hot, health),
    )


def _moves(
    ground: Ground, health: Health, tiers: _Tiers, links: LinkTable, connections: Connections
) -> _Moves:
    identity, clock, store, workers = ground.identity, ground.clock, ground.store, ground.workers
    erased, service_time, moving = ground.erased, ground.service_time, ground.engine.moving
    records, owned, mending, budget = tiers.records, tiers.owned, tiers.mending, tiers.budget
    moves = IncomingMoves(clock)
    warm_up = WarmUp(moves, store, workers, ground.engine, tiers.hot, health)
    tiers.hot.count(warm_up)
    end = IncomingEnd(clock, moves, warm_up, store, workers, erased, moving)
    fetching = Fetching(identity, clock, store, workers, links, connections, ground.fetch)
    copies = IncomingCopies(identity, store, budget, fetching, moves, warm_up, end)
    kept = KeptCopies(identity, records, budget, moves, end)
    offers = Offers(ground.transfers)
    step_downs = StepDowns(records, erased)
    return _Moves(
        moves=moves,
        warm_up=warm_up,
        incoming_end=end,
        copies=copies,
        target=MoveTarget(
            identity.name, records, service_time, moves, copies, warm_up, end, moving
        ),
        source=MoveSource(records, mending, offers, owned, step_downs, moving, health),
        step_downs=step_downs,
        copy_source=CopySource(identity.name, owned, mending, offers),
        replicas=ReplicaTarget(store, moves, kept, end),
        takeovers=Takeovers(identity.name, records, mending, erased),
        forks=ForkTarget(clock, store, kept, erased, service_time, health),
        span_source=SpanSource(identity, records.table, store, erased, workers, offers, health),
        span_target=SpanTarget(
            identity, store, workers, budget, tiers.leases, copies, fetching, moves, end, health
        ),
        exports=Exports(identity, clock, records, owned, mending, tiers.flusher),
        imports=Imports(identity, clock, records, budget, erased, service_time, health),
    )


def _erasing(ground: Ground, health: Health, tiers: _Tiers, end: IncomingEnd) -> Erasing:
    identity, store, erased = ground.identity, ground.store, ground.erased
    removal = AgentRemoval(
        tiers.records,
        ground.transfers.offers,
        tiers.prefetches,
        end.forget_agent,
        tiers.leases,
        DerivedMemory(tiers.records, erased, tiers.prefetches),
    )
    folders = ErasedFolders(
        identity.config.data_dir,
        folder_name(identity.fingerprint),
        identity.settings.durability,
        identity.cluster_key,
        erased.epoch_of,
    )
    key = identity.cluster_key
    return Erasing(ground.table, store, ground.workers, erased, folders, removal, health, key)


def _directive_store(ground: Ground, tiers: _Tiers, erasing: Erasing) -> DirectiveStore:
    markup_ids = ground.tokenizer.markup_ids
    records, mending, flusher = tiers.records, tiers.mending, tiers.flusher
    return DirectiveStore(
        tiers.owned, records, mending, flusher, markup_ids, tiers.eviction, erasing
    )


def _turns(
    ground: Ground, health: Health, tiers: _Tiers, moves: _Moves, live_turns: LiveTurns
) -> TurnServer:
    identity, engine, tokenizer = ground.identity, ground.engine, ground.tokenizer
    table, store, hot = ground.table, ground.store, tiers.hot
    encoder = PromptEncoder(identity, tokenizer, PromptBoundaries(tokenizer))
    grammars = _grammars(identity, tokenizer)
    prompts = PromptPipeline(tokenizer, encoder, EncoderThreads(), grammars, store.salt)
    claims = Claims(
        table,
        tiers.budget,
        ground.erased,
        moves.moves,
        engine.moving,
        hot,
        health,
        engine.retry_after_s,
    )
    workers, clock = ground.workers, ground.clock
    edited = EditedPrefixes(store, workers, clock)
    borrowed = BorrowedSpans(identity, store, ground.erased, workers, clock, table, tokenizer)
    prefixes = Prefixes(
        identity,
        store,
        workers,
        engine,
        tiers.prefetches,
        health,
        table,
        edited,
        borrowed,
        moves.moves,
        tiers.leases,
    )
    sequences = Sequences(identity, tokenizer, prefixes, engine, hot, health)
    savers = Savers(ground.clock, table, tiers.writers, tiers.unsaved, ground.service_time, health)
    return TurnServer(prompts, claims, prefixes, sequences, savers, engine, live_turns, health)


def _grammars(identity: NodeIdentity, tokenizer: ChatTokenizer) -> AnswerGrammars:
    def facts() -> TokenizerFacts:
        return TokenizerFacts(
            tokenizer.definition,
            identity.model.vocabulary_size,
            tokenizer.eos_ids,
            tokenizer.added_ids,
        )

    return AnswerGrammars(Compiler(facts), tokenizer)
