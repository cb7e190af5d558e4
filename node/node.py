"""A running node without its transports: the nouns that a turn or a control call works on."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fabric.block import BlockRef
from fabric.cache_spec import ModelCacheSpec
from fabric.control import Address, NodeView, SelfTest, TierBytes
from fabric.errors import OverloadedError, RetryElsewhereError
from fabric.generation import Event, GenerateRequest
from fabric.ids import Fingerprint, MigrationId, NodeName
from fabric.limits import BLOCK_TOKENS, FETCHES_MAX, FETCHES_WAITING_MAX
from fabric.manifest import OwnerState
from fabric.ports import Clock
from fabric.settings import NodeSettings
from fabric.transfer_counts import FETCHING, SENDING, bounded
from node.agent_store import AgentStore
from node.agent_table import AgentTable
from node.arrivals import Arrivals
from node.connections import Connections
from node.engine_thread import EngineThread
from node.erased import Erased
from node.flusher import Flusher
from node.landings import Landings
from node.link_table import LinkTable
from node.mlx.chat_tokenizer import ChatTokenizer
from node.prefetch import Prefetches
from node.reclaim import Reclaim
from node.transfer_client import TransferReport, fetch_blocks
from node.transfer_server import TransferServer
from node.turn import Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a node is started with."""

    name: NodeName
    data_dir: Path
    model: str
    cluster_key: bytes
    settings: NodeSettings
    host: str
    incarnation: int


@dataclass(slots=True, eq=False)
class Node:
    """The parts of a node; mutable state is touched on its event loop only."""

    config: NodeConfig
    clock: Clock
    engine: EngineThread
    tokenizer: ChatTokenizer
    spec: ModelCacheSpec
    fingerprint: Fingerprint
    model_name: str
    context_tokens_max: int
    store: AgentStore
    table: AgentTable
    transfers: TransferServer
    erased: Erased
    workers: ThreadPoolExecutor
    self_test: SelfTest
    problem: str | None = None  # why no agent's cache is kept: every prompt is computed whole
    vocabulary_size: int = 0  # token ids that the model takes
    http_url: str = ""
    is_draining: bool = False  # no new agents: somebody said so
    is_stopping: bool = False
    degraded: str | None = None
    owes_erasures: bool = False  # the disk refused to let an erased agent go
    scrubbed_bytes: int = 0
    connections: Connections = field(default_factory=Connections)
    fenced_turns: int = 0
    fetch: Callable[..., TransferReport] = fetch_blocks  # brings blocks from a peer; blocks
    flusher: Flusher = field(init=False)
    reclaim: Reclaim = field(init=False)
    arrivals: Arrivals = field(init=False)
    prefetches: Prefetches = field(init=False)
    links: LinkTable = field(init=False)
    fetchers: ThreadPoolExecutor = field(init=False)
    _fetching_count: int = 0
    turns: set[Turn] = field(default_factory=set)
    adopted: dict[MigrationId, list[BlockRef]] = field(default_factory=dict)  # not yet owned
    deciding: asyncio.Lock = field(default_factory=asyncio.Lock)  # commits and aborts of moves
    adopted_s: dict[MigrationId, float] = field(default_factory=dict)  # when a block last came
    aborted: OrderedDict[MigrationId, None] = field(default_factory=OrderedDict)
    landings: Landings = field(default_factory=Landings)

    def __post_init__(self) -> None:
        """Look after unsaved agents, the disk's budget, what comes into memory, and links."""
        self.fetchers = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="fetch")
        self.flusher = Flusher(self)
        self.arrivals = Arrivals(self)
        self.reclaim = Reclaim(self)
        self.prefetches = Prefetches(self)
        self.links = LinkTable(self.clock)

    @property
    def name(self) -> NodeName:
        """This node's name."""
        return self.config.name

    @property
    def reuses(self) -> bool:
        """Say whether caches are kept and reused."""
        return self.problem is None

    @property
    def settings(self) -> NodeSettings:
        """This node's budgets and policies."""
        return self.config.settings

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work (disk, hashing, tokenizing) on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    async def in_fetcher(self, work: Callable[[], T]) -> T:
        """Run a fetch, which may take an hour, where it holds up no turn's work."""
        if self._fetching_count >= FETCHES_WAITING_MAX:
            message = f"{FETCHES_WAITING_MAX} agents are being copied here"
            raise OverloadedError(message)
        self._fetching_count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.fetchers, work)
        finally:
            self._fetching_count -= 1

    async def on_engine(self, work: Callable[[], T]) -> T:
        """Run work on the engine thread between two steps."""
        return await asyncio.wrap_future(self.engine.call(work))

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one turn; closing the iterator cancels it."""
        return Turn(self, request).events()

    def note_hot(self) -> None:
        """Tell the memory budget what idle caches hold now; call it after every change."""
        held_bytes = self.table.hot_bytes + self.arrivals.size_bytes
        self.engine.budget.set_idle(held_bytes)
        if held_bytes > self.settings.hot_bytes:
            self.flusher.hurry()

    def make_room(self, size_bytes: int) -> None:
        """Cool idle agents until `size_bytes` more are free, as far as that goes."""
        wanted_bytes = self.table.hot_bytes - size_bytes
        self.table.cool(wanted_bytes)
        if self.table.hot_bytes > wanted_bytes:
            self.arrivals.clear()
        self.note_hot()
        self.flusher.hurry()
        self.engine.wake()

    @property
    def state(self) -> str:
        """Say in a word what the node takes."""
        if self.is_stopping:
            return "stopping"
        return "draining" if self.is_draining else "ready"

    def refuse_new(self) -> None:
        """Raise where this node takes no new agents."""
        if self.is_draining or self.is_stopping:
            message = f"this node is {self.state}"
            raise RetryElsewhereError(message, code="draining")

    def usable_prefix(self, tokens_count: int) -> int:
        """Round a reusable prefix down to what the chunk policy allows."""
        if self.settings.exact_chunks:
            return tokens_count // BLOCK_TOKENS * BLOCK_TOKENS
        return tokens_count

    def addresses(self) -> tuple[Address, ...]:
        """Where the data plane listens."""
        return self.transfers.addresses()

    async def quiesce(self) -> None:
        """Wait until every turn in progress has been saved."""
        while self.turns:
            await asyncio.gather(*(turn.task for turn in self.turns), return_exceptions=True)

    def view(self) -> NodeView:
        """Describe the node for its beat."""
        agents = [a for a in self.table if a.manifest.state is not OwnerState.REPLICA]
        speed = self.engine.prefill_speed.per_s
        return NodeView(
            name=self.name,
            host=self.config.host,
            pid=os.getpid(),
            incarnation=self.config.incarnation,
            http_url=self.http_url,
            model=self.model_name,
            fingerprint=self.fingerprint.hex(),
            context_tokens_max=self.context_tokens_max,
            state=self.state,
            agents=len(agents),
            tokens=sum(agent.manifest.tokens_count for agent in agents),
            bytes=TierBytes(hot=self.table.hot_bytes, disk=self.store.blocks.total_bytes),
            addresses=self.addresses(),
            waiting=self.engine.waiting_count,
            active=self.engine.active_count,
            queue_s=self.engine.queued_tokens / speed if speed else 0.0,
            prefill_tokens_per_s=speed,
            decode_tokens_per_s=self.engine.decode_speed.per_s,
            bytes_per_token=self.spec.bytes_per_token,
            self_test=self.self_test,
            degraded=self.degraded,
            reuse=self.reuses,
            changes=self.table.changes,
            evicted_agents=self.reclaim.evicted_count,
            scrubbed_bytes=self.scrubbed_bytes,
            damaged_blocks=self.store.blocks.damaged_count,
            free=TierBytes(
                hot=max(0, self.settings.hot_bytes - self.table.hot_bytes),
                disk=self.reclaim.free_bytes,
            ),
            links=self.links.views(),
            erased=self.erased.fingerprint,
            fenced_turns=self.fenced_turns,
            sending=bounded(self.transfers.counts(), SENDING),
            fetching=bounded(self.connections.counts(), FETCHING),
        )
