"""Assembly of a node from its resources.

Each part is given the few others that it works with, and none the whole node. The resources differ
between a Mac and a simulation; the rest is the same.
"""

from node.agents.owned import OwnedAgents
from node.drain_flag import DrainFlag
from node.folder_return import FolderReturn
from node.grammar.compiler import Compiler, TokenizerFacts
from node.migration.copy_targets import CopyPublisher, ForkTarget, ReplicaTarget
from node.migration.fetching import Fetching
from node.migration.hibernation_export import Exports
from node.migration.hibernation_import import Imports
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.ownership import OwnershipReleases, Takeovers
from node.migration.prefix_source import SharedPrefixSource
from node.migration.prefix_target import SharedPrefixTarget
from node.migration.record_offers import CopySource, RecordOffers
from node.migration.source import MoveSource
from node.migration.target import IncomingCopies, MoveTarget
from node.migration.warm_up import WarmUp
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.thought_budget import ThoughtBudgets
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.node import AgentCommands, Background, Moves, Node, NodeResources, Tiers
from node.prompt.answer_grammars import AnswerGrammars
from node.prompt.pipeline import PromptPipeline
from node.prompt.prompt_boundaries import PromptBoundaries
from node.prompt.prompt_encoder import EncoderThreads, PromptEncoder
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.live_turns import LiveTurns
from node.self_test import Questions, SelfTests
from node.store.granted_terms import GrantedTerms
from node.store.model_folders import folder_name
from node.store.scrubber import Scrubber
from node.store.warm_start import WarmStart
from node.system_sleep import SystemSleep, system_notices
from node.tiers.agent_records import AgentRecords, RecordMending
from node.tiers.derived_memory import DerivedMemory
from node.tiers.directive_store import DirectiveStore
from node.tiers.disk_budget import DiskBudget, DiskSurvey
from node.tiers.erasure import AgentRemoval, Erasing
from node.tiers.eviction import Eviction
from node.tiers.flusher import Flusher
from node.tiers.hot_tier import HotTier, Unsaved
from node.tiers.memory_pressure import MemoryPressure
from node.tiers.other_folders import ErasedFolders, OtherFolders
from node.tiers.pins import Pinning, Pins
from node.tiers.prefetch import Prefetches
from node.tiers.record_writer import RecordWriters
from node.tiers.restore import Restores
from node.tiers.span_leases import SpanLeases
from node.transfer.peer_calls import PeerCalls
from node.turn.borrowed_spans import BorrowedSpans
from node.turn.claim import Claims
from node.turn.edited_prefix import EditedPrefixes
from node.turn.fetched_heads import FetchedHeads
from node.turn.heads import TurnHeads
from node.turn.lent_heads import HeadLenders
from node.turn.prefix import Prefixes
from node.turn.saver import Savers
from node.turn.turn import TurnServer
from node.turn.turn_sequence import Sequences
from node.upkeep import Retries, Upkeep


def assemble(resources: NodeResources) -> Node:
    """Build a node without starting anything; call it on its event loop or before that runs."""
    identity, clock, workers = resources.identity, resources.clock, resources.workers
    health = Health(identity.name, identity.model.problem)
    links, connections = LinkTable(clock), Connections()
    live_turns = LiveTurns(health)
    tiers = _tiers(resources, health)
    moves = _moves(resources, health, tiers, links, connections)
    erasing = _erasing(resources, health, tiers, moves.cleanup)
    terms = GrantedTerms(identity.config.data_dir, workers, clock)
    heads, lenders, fetched = _heads(
        resources, health, tiers, moves, links, connections, live_turns
    )
    turns = _turns(resources, health, tiers, moves.incoming, live_turns, terms, heads, fetched)
    questions = Questions(identity, resources.tokenizer, workers, turns)
    self_tests = SelfTests(clock, tiers.records, questions, live_turns, health)
    drain_flag = DrainFlag(identity.config.data_dir, workers, health)
    folders = _folders(resources, health, tiers, erasing, drain_flag)
    upkeep = Upkeep(
        budget=tiers.budget,
        pins=tiers.pins,
        cleanup=moves.cleanup,
        store=resources.store,
        workers=workers,
        service_time=resources.service_time,
        folders=folders,
        health=health,
    )
    return Node(
        resources=resources,
        health=health,
        live_turns=live_turns,
        terms=terms,
        links=links,
        connections=connections,
        tiers=tiers,
        moves=moves,
        commands=AgentCommands(
            erasing=erasing,
            pinning=Pinning(tiers.owned, tiers.pins, upkeep.round),
            directive_store=_directive_store(resources, tiers, erasing),
        ),
        turns=turns,
        lenders=lenders,
        background=Background(
            self_tests=self_tests,
            pressure=MemoryPressure(
                resources.gauge, resources.engine, tiers.hot, clock, health.note_failed_round
            ),
            upkeep=upkeep,
            retries=Retries(
                erasing=erasing,
                records=tiers.records,
                unsaved=tiers.unsaved,
                flusher=tiers.flusher,
                releases=moves.releases,
                self_tests=self_tests,
                folders=folders,
                health=health,
            ),
            folders=folders,
            scrubber=Scrubber(
                identity.settings, clock, workers, resources.store.blocks, live_turns, health
            ),
            warm_start=WarmStart(workers, resources.store.blocks, live_turns, health),
            drain_flag=drain_flag,
            sleep=SystemSleep(health, live_turns, tiers.flusher.flush, system_notices()),
        ),
    )


def _tiers(resources: NodeResources, health: Health) -> Tiers:
    store, table = resources.store, resources.table
    workers, engine = resources.workers, resources.engine
    settings, offers = resources.identity.settings, resources.transfers.offers
    owned = OwnedAgents(table, resources.erased)
    unsaved = Unsaved(table, health)
    hot = HotTier(table, engine, unsaved)
    eviction = Eviction(table, store, workers, offers, hot)
    survey = DiskSurvey(table, store, workers, offers, engine, settings.disk_bytes)
    others = OtherFolders(resources.identity, resources.clock, workers, resources.service_time)
    leases = SpanLeases(resources.clock, store.blocks, resources.erased)
    budget = DiskBudget(settings, table, store, workers, survey, eviction, others, leases)
    writers = RecordWriters(store, workers, engine, budget)
    records = AgentRecords(table, store, workers, hot)
    restores = Restores(store, workers, resources.clock)
    mending = RecordMending(records, writers)
    return Tiers(
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
        restores=restores,
        prefetches=Prefetches(owned, store, workers, restores, engine, hot, health),
    )


def _moves(
    resources: NodeResources,
    health: Health,
    tiers: Tiers,
    links: LinkTable,
    connections: Connections,
) -> Moves:
    identity, clock = resources.identity, resources.clock
    store, workers = resources.store, resources.workers
    erased, service_time, moving = resources.erased, resources.service_time, resources.engine.moving
    records, owned, mending, budget = tiers.records, tiers.owned, tiers.mending, tiers.budget
    incoming = IncomingMoves(clock)
    warm_up = WarmUp(incoming, store, workers, resources.engine, tiers.hot, health)
    tiers.hot.count(warm_up)
    cleanup = IncomingCleanup(clock, incoming, warm_up, store, workers, erased, moving)
    fetching = Fetching(identity, clock, store, workers, links, connections, resources.fetch)
    copies = IncomingCopies(identity, store, budget, fetching, incoming, warm_up, cleanup)
    kept = CopyPublisher(identity, records, budget, incoming, cleanup)
    offers = RecordOffers(resources.transfers)
    releases = OwnershipReleases(records, erased)
    return Moves(
        incoming=incoming,
        warm_up=warm_up,
        cleanup=cleanup,
        copies=copies,
        target=MoveTarget(
            identity.name, records, service_time, incoming, copies, warm_up, cleanup, moving
        ),
        source=MoveSource(records, mending, offers, owned, releases, moving, health),
        releases=releases,
        copy_source=CopySource(identity.name, owned, mending, offers),
        replicas=ReplicaTarget(store, incoming, kept, cleanup),
        takeovers=Takeovers(identity.name, records, mending, erased),
        forks=ForkTarget(clock, store, kept, erased, service_time, health),
        prefix_source=SharedPrefixSource(
            identity, records.table, store, erased, workers, offers, health
        ),
        prefix_target=SharedPrefixTarget(
            identity,
            store,
            workers,
            budget,
            tiers.leases,
            copies,
            fetching,
            incoming,
            cleanup,
            health,
        ),
        exports=Exports(identity, clock, records, owned, mending, tiers.flusher),
        imports=Imports(identity, clock, records, budget, erased, service_time, health),
    )


def _heads(
    resources: NodeResources,
    health: Health,
    tiers: Tiers,
    moves: Moves,
    links: LinkTable,
    connections: Connections,
    live_turns: LiveTurns,
) -> tuple[TurnHeads, HeadLenders, FetchedHeads]:
    identity, store, workers = resources.identity, resources.store, resources.workers
    exact = identity.settings.exact_chunks
    heads = TurnHeads(store, workers, health, exact_chunks=exact)
    lenders = HeadLenders(
        resources.clock,
        resources.table,
        store,
        resources.erased,
        workers,
        resources.engine,
        resources.transfers,
        moves.prefix_source,
        tiers.leases,
        heads,
        live_turns,
        health,
    )
    ask = resources.ask or PeerCalls(identity, workers, links, connections).call
    target, engine = moves.prefix_target, resources.engine
    fetched = FetchedHeads(identity, store, engine, links, target, ask, health)
    return heads, lenders, fetched


def _erasing(
    resources: NodeResources, health: Health, tiers: Tiers, cleanup: IncomingCleanup
) -> Erasing:
    identity, store, erased = resources.identity, resources.store, resources.erased
    removal = AgentRemoval(
        tiers.records,
        resources.transfers.offers,
        tiers.prefetches,
        cleanup.abort_agent,
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
    return Erasing(resources.table, store, resources.workers, erased, folders, removal, health, key)


def _folders(
    resources: NodeResources, health: Health, tiers: Tiers, erasing: Erasing, drain_flag: DrainFlag
) -> FolderReturn:
    return FolderReturn(
        resources.folders,
        tiers.mending,
        tiers.unsaved,
        erasing,
        resources.service_time,
        drain_flag,
        health,
    )


def _directive_store(resources: NodeResources, tiers: Tiers, erasing: Erasing) -> DirectiveStore:
    markup_ids = resources.tokenizer.markup_ids
    records, mending, flusher = tiers.records, tiers.mending, tiers.flusher
    return DirectiveStore(
        tiers.owned, records, mending, flusher, markup_ids, tiers.eviction, erasing
    )


def _turns(
    resources: NodeResources,
    health: Health,
    tiers: Tiers,
    incoming: IncomingMoves,
    live_turns: LiveTurns,
    terms: GrantedTerms,
    heads: TurnHeads,
    fetched: FetchedHeads,
) -> TurnServer:
    identity, engine, tokenizer = resources.identity, resources.engine, resources.tokenizer
    table, store, hot = resources.table, resources.store, tiers.hot
    encoder = PromptEncoder(identity, tokenizer, PromptBoundaries(tokenizer))
    grammars = _grammars(identity, tokenizer)
    budgets = ThoughtBudgets(tokenizer, identity.settings)
    prompts = PromptPipeline(tokenizer, encoder, EncoderThreads(), grammars, store.salt, budgets)
    claims = Claims(
        table,
        tiers.budget,
        resources.erased,
        incoming,
        engine.moving,
        hot,
        health,
        engine.retry_after_s,
        terms,
    )
    workers, clock = resources.workers, resources.clock
    edited = EditedPrefixes(store, workers, clock)
    borrowed = BorrowedSpans(identity, store, resources.erased, workers, clock, table, tokenizer)
    prefixes = Prefixes(
        identity,
        store,
        workers,
        tiers.restores,
        engine,
        tiers.prefetches,
        health,
        table,
        edited,
        borrowed,
        incoming,
        tiers.leases,
        heads,
    )
    sequences = Sequences(identity, tokenizer, prefixes, engine, hot, health, heads)
    savers = Savers(
        resources.clock, table, tiers.writers, tiers.unsaved, resources.service_time, health, heads
    )
    return TurnServer(
        prompts, claims, prefixes, sequences, savers, heads, fetched, engine, live_turns, health
    )


def _grammars(identity: NodeIdentity, tokenizer: ChatTokenizer) -> AnswerGrammars:
    def facts() -> TokenizerFacts:
        return TokenizerFacts(
            tokenizer.definition,
            identity.model.vocabulary_size,
            tokenizer.eos_ids,
            tokenizer.added_ids,
        )

    return AnswerGrammars(Compiler(facts), tokenizer)
