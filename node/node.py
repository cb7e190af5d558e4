"""A running node without its transports: the nouns that a turn or a control call works on."""

import asyncio
import os
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from fabric.control.node_calls import NodeView, SelfTest, TierBytes
from fabric.errors import OverloadedError, RetryElsewhereError, RetryLaterError
from fabric.ids import AgentKey, Fingerprint, MigrationId, NodeName
from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.limits import BLOCK_TOKENS, FETCHES_MAX, FETCHES_WAITING_MAX, HASTY_WORKERS
from fabric.net.links import Address
from fabric.net.transfer_counts import FETCHING, SENDING, bounded
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.settings import NodeSettings
from fabric.turn.generation import Event, GenerateRequest
from fabric.turn.prompt_limit import prompt_bytes_max
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.haste import in_haste
from node.migration.adoption import Adoption
from node.migration.handover_waiters import Landings
from node.migration.warm_up import Arrivals
from node.mlx.chat_tokenizer import ChatTokenizer
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime
from node.store.tombstones import Erased
from node.tiers.disk_budget import Reclaim
from node.tiers.erasure import Erasing
from node.tiers.flusher import Flusher
from node.tiers.prefetch import Prefetches
from node.transfer.client import TransferReport, fetch_blocks
from node.transfer.server import TransferServer
from node.turn.encoders import Encoders
from node.turn.turn import Turn

T = TypeVar("T")
NOT_ERASED = "an erasure is not complete on the disk"


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
    tls: ssl.SSLContext | None = None  # None: plain HTTP, which no router of a real fabric asks


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
    service_time: ServiceTime = field(default=None)  # type: ignore[assignment]  # one is made
    is_tested: bool = False  # the self-test could tell whether stored agents come back
    turns_begun: int = 0
    problem: str | None = None  # why no agent's cache is kept: every prompt is computed whole
    vocabulary_size: int = 0  # token ids that the model takes
    http_url: str = ""
    is_draining: bool = False  # no new agents: somebody said so
    is_stopping: bool = False
    troubles: dict[str, str] = field(default_factory=dict)  # what is wrong now, by its cause
    scrubbed_bytes: int = 0
    connections: Connections = field(default_factory=Connections)
    fenced_turns: int = 0
    failed_rounds: int = 0  # of background work
    fetch: Callable[..., TransferReport] = fetch_blocks  # brings blocks from a peer; blocks
    encoders: Encoders = field(default_factory=Encoders)
    flusher: Flusher = field(init=False)
    erasing: Erasing = field(init=False)
    reclaim: Reclaim = field(init=False)
    arrivals: Arrivals = field(init=False)
    prefetches: Prefetches = field(init=False)
    links: LinkTable = field(init=False)
    fetchers: ThreadPoolExecutor = field(init=False)
    hasty_workers: ThreadPoolExecutor = field(init=False)
    hasty_fetchers: ThreadPoolExecutor = field(init=False)
    _fetching_count: int = 0
    turns: set[Turn] = field(default_factory=set)
    adopted: dict[MigrationId, Adoption] = field(default_factory=dict)  # not yet owned
    _deciding: WeakValueDictionary[AgentKey, asyncio.Lock] = field(
        default_factory=WeakValueDictionary
    )
    aborted: OrderedDict[MigrationId, None] = field(default_factory=OrderedDict)
    landings: Landings = field(default_factory=Landings)

    def __post_init__(self) -> None:
        """Look after unsaved agents, the disk's budget, what comes into memory, and links."""
        if self.service_time is None:
            self.service_time = ServiceTime(self.name, self.clock)
        self.fetchers = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="fetch")
        self.hasty_workers = ThreadPoolExecutor(HASTY_WORKERS, thread_name_prefix="worker_now")
        self.hasty_fetchers = ThreadPoolExecutor(HASTY_WORKERS, thread_name_prefix="fetch_now")
        self.flusher = Flusher(self)
        self.erasing = Erasing(self)
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
    def degraded(self) -> str | None:
        """Say in words what is wrong now, to whoever asks for the node's health."""
        owed = [NOT_ERASED] if self.erasing.has_failed else []
        return "; ".join([*self.troubles.values(), *owed]) or None

    @property
    def settings(self) -> NodeSettings:
        """This node's budgets and policies."""
        return self.config.settings

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work (disk, hashing) on a worker thread."""
        workers = self.hasty_workers if in_haste() else self.workers
        return await asyncio.get_running_loop().run_in_executor(workers, work)

    async def in_fetcher(self, work: Callable[[], T]) -> T:
        """Run a fetch, which may take an hour, where it holds up no turn's work."""
        if self._fetching_count >= FETCHES_WAITING_MAX:
            message = f"{FETCHES_WAITING_MAX} agents are being copied here"
            raise OverloadedError(message)
        self._fetching_count += 1
        fetchers = self.hasty_fetchers if in_haste() else self.fetchers
        try:
            return await asyncio.get_running_loop().run_in_executor(fetchers, work)
        finally:
            self._fetching_count -= 1

    def deciding(self, key: AgentKey) -> asyncio.Lock:
        """Return the lock under which commits, aborts and kept copies of one agent are decided."""
        return self._deciding.setdefault(key, asyncio.Lock())

    async def on_engine(self, work: Callable[[], T]) -> T:
        """Run work on the engine thread between two steps."""
        return await asyncio.wrap_future(self.engine.call(work))

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one turn; closing the iterator cancels it."""
        return Turn(self, request).events()

    def note_failed_round(self) -> None:
        """Count a round of background work that failed; its loop has told the log."""
        self.failed_rounds += 1

    def note_hot(self) -> None:
        """Tell the memory budget what idle caches hold now; call it after every change."""
        held_bytes = self.table.hot_bytes + self.arrivals.size_bytes
        self.engine.budget.set_idle(held_bytes)
        if held_bytes > self.settings.hot_bytes:
            self.flusher.hurry()

    def make_room(self, size_bytes: int) -> None:
        """Cool idle agents until `size_bytes` more are free, as far as that goes."""
        before_bytes = self.engine.budget.idle_bytes
        wanted_bytes = self.table.hot_bytes - size_bytes
        self.table.cool(wanted_bytes)
        if self.table.hot_bytes > wanted_bytes:
            self.arrivals.clear()
        self.note_hot()
        self.flusher.hurry()
        # Where nothing was freed, whoever asked would only ask again: its next poll is soon.
        if self.engine.budget.idle_bytes < before_bytes:
            self.engine.wake()

    @property
    def state(self) -> str:
        """Say in a word what the node takes."""
        if self.is_stopping:
            return "stopping"
        return "draining" if self.is_draining else "ready"

    @property
    def stopping(self) -> RetryLaterError | None:
        """Return why no turn is served any more, if that is so."""
        if not self.is_stopping:
            return None
        message = f"{self.name} is stopping"
        return RetryLaterError(message, code="stopping")

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

    async def quiesce(self, limit_s: float | None = None) -> int:
        """Wait until every turn in progress has been saved; return how many still run at the limit.

        Turns that begin meanwhile are not waited for.
        """
        tasks = {turn.task for turn in self.turns}
        if not tasks:
            return 0
        _, running = await asyncio.wait(tasks, timeout=limit_s)
        return len(running)

    async def end_turns(self) -> None:
        """Serve no turn any more; wait until those in progress have been saved."""
        self.is_draining = self.is_stopping = True
        for turn in list(self.turns):
            turn.cancel()
        await self.quiesce()

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
            failed_rounds=self.failed_rounds,
            sending=bounded(self.transfers.counts(), SENDING),
            fetching=bounded(self.connections.counts(), FETCHING),
            prompt_bytes_max=prompt_bytes_max(self.context_tokens_max, self.tokenizer.reach_bytes),
        )
