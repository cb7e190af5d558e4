"""A modelled node: its engine, its caches, and its reports to the router."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fabric import PROTOCOL_VERSION
from fabric.control.agent_at import AgentName
from fabric.control.node_calls import (
    DRAINING,
    READY,
    AgentList,
    AgentSketch,
    AgentView,
    ListAgents,
    NodeView,
    SelfTest,
    TierBytes,
)
from fabric.ids import DEFAULT_TENANT, AgentId, NodeName
from fabric.limits import BLOCK_TOKENS
from fabric.net.links import Address, LinkKind
from fabric.record.manifest import OwnerState
from router.simulate.content import Extent
from router.simulate.engine import ModelledEngine, NodeTurn
from router.simulate.fleet_file import FleetModel, NodeModel
from router.simulate.node_cache import KeptAgent, NodeCache
from router.simulate.timeline import Timeline

MODEL: Final = "simulated"
CONTEXT_TOKENS: Final = 1 << 20
_TESTED: Final = SelfTest(passed=True, detail="", seconds=0.0)


@dataclass(slots=True)
class Misjudged:
    """Factors by which the speeds that a node reports differ from its real ones."""

    prefill: float = 1.0
    decode: float = 1.0


class Machine:
    """Node that computes turns in simulated time."""

    def __init__(self, timeline: Timeline, model: NodeModel, fleet: FleetModel) -> None:
        self.name = NodeName(model.name)
        self.model = model
        self.is_up = True
        self.is_draining = False
        self.misjudged = Misjudged()
        self.turns_count = 0
        self.on_arrival: Callable[[NodeTurn], None] = lambda _: None  # of a turn, before it queues
        self._timeline = timeline
        self._fleet = fleet
        self._incarnation = 1
        self._changes = 1
        self._changed: OrderedDict[AgentId, int] = OrderedDict()  # the latest change at the end
        self._gone: OrderedDict[AgentId, int] = OrderedDict()
        self._running: dict[AgentId, NodeTurn] = {}
        self._view: tuple[object, NodeView] | None = None
        self.cache = NodeCache(
            model.hot_bytes, model.disk_bytes, fleet.kv_bytes_per_token, model.disk_bytes_per_s
        )
        self.engine = ModelledEngine(
            timeline,
            model,
            self.cache,
            self._end_answer,
            shares_heads=fleet.shares_heads_in_flight,
            chunk_tokens_max=fleet.chunk_tokens_max,
        )

    # --- turns ---------------------------------------------------------------------------------

    def start(self, job: NodeTurn) -> int:
        """Admit a turn; return the epoch at which the node has its agent."""
        record = self.cache.agents.get(job.agent)
        job.epoch = max(job.epoch, record.epoch if record is not None else 0, 1)
        if record is None or record.epoch != job.epoch or record.state is not OwnerState.OWNED:
            if record is not None:
                record.epoch, record.state = job.epoch, OwnerState.OWNED
            self._note_change(job.agent)  # claimed, and listed without a sketch if it is new
        self._running[job.agent] = job
        match = self.cache.look_up(job.agent, job.prompt, self._timeline.now_s)
        job.cached_tokens, job.disk_tokens = match.tokens, match.disk_tokens
        self.turns_count += 1
        self.on_arrival(job)
        self.engine.add(job)
        return job.epoch

    def lendable(self, prompt: Extent) -> tuple[int, int]:
        """Return the stored and the coming tokens of a beginning, in whole blocks."""
        published, coming = self.engine.lendable(prompt)
        ready = max(published, self.cache.shared_tokens(prompt, self._timeline.now_s))
        most = prompt.tokens - 1
        return _whole_blocks(min(ready, most)), _whole_blocks(min(coming, most))

    def _end_answer(self, job: NodeTurn) -> None:
        """Save a turn's last blocks, then end it."""
        missing = job.prompt.tokens + job.answer_tokens - job.cached_tokens
        unsaved = min(missing, job.answer_tokens + BLOCK_TOKENS)  # earlier blocks are saved ahead
        saving_s = unsaved * self.cache.bytes_per_token / self.model.disk_bytes_per_s
        self._timeline.after(saving_s, self._end_save, job)

    def _end_save(self, job: NodeTurn) -> None:
        if job.is_gone:
            return
        self._running.pop(job.agent, None)
        record = self.cache.agents.get(job.agent)
        revision = record.revision + 1 if record is not None else 1
        job.on_end()  # which extends the content by the answer
        extent = Extent.of(job.prompt.content)
        self.keep(KeptAgent(job.agent, extent, job.sketch, job.epoch, revision), is_hot=True)

    def keep(self, record: KeptAgent, *, is_hot: bool) -> None:
        """Store an agent, and list it."""
        record.used_s = self._timeline.now_s
        self.cache.keep(record, is_hot=is_hot)
        self._note_change(record.agent)

    def release(self, agent: AgentId) -> None:
        """Keep an agent that another node owns now as a replica."""
        record = self.cache.agents.get(agent)
        if record is not None:
            record.state = OwnerState.REPLICA
            self._note_change(agent)

    # --- life ----------------------------------------------------------------------------------

    def die(self) -> None:
        """Lose all turns and all that is in memory only."""
        self.is_up = False
        self.cache.lose_memory()
        self.engine.abandon()
        lost, self._running = list(self._running.values()), {}
        for job in lost:
            job.is_gone = True
            job.on_lost()

    def restart(self) -> None:
        """Start again, with the agents on the disk."""
        self.is_up = True
        self._incarnation += 1
        self._changes = 1
        self._changed = OrderedDict.fromkeys(self.cache.agents, 1)
        self._gone.clear()

    # --- reports -------------------------------------------------------------------------------

    def view(self) -> NodeView:
        """Return the node's state; the same object while nothing has changed."""
        self._note_evictions()
        misjudged = self.misjudged
        state = (
            *(self._changes, self.engine.changes_count, self._incarnation, self.is_draining),
            *(misjudged.prefill, misjudged.decode),
        )
        if self._view is None or self._view[0] != state:
            self._view = (state, self._build_view())
        return self._view[1]

    def _build_view(self) -> NodeView:
        engine, cache, model = self.engine, self.cache, self.model
        speed = model.prefill_tokens_per_s
        return NodeView(
            name=self.name,
            host=self.name,
            pid=1,
            incarnation=self._incarnation,
            http_url="",
            model=MODEL,
            fingerprint=MODEL,
            context_tokens_max=CONTEXT_TOKENS,
            state=DRAINING if self.is_draining else READY,
            agents=len(cache.agents),
            tokens=cache.disk_tokens,
            bytes=TierBytes(cache.hot_bytes, cache.disk_tokens * cache.bytes_per_token),
            addresses=(Address(self.name, 1, LinkKind.ETHERNET, round(model.link_mbit)),),
            waiting=engine.waiting_count,
            active=engine.decoding_count,
            queue_s=engine.queue_tokens / speed,
            prefill_tokens_per_s=speed * self.misjudged.prefill,
            decode_tokens_per_s=model.decode_tokens_per_s * self.misjudged.decode,
            bytes_per_token=cache.bytes_per_token,
            self_test=_TESTED,
            changes=self._changes,
            free=TierBytes(cache.free_hot_bytes, cache.free_disk_bytes),
            protocol=PROTOCOL_VERSION if self._fleet.lends_heads else None,
            restore_bytes_per_s=model.disk_bytes_per_s if engine.has_read else None,
        )

    def list_agents(self, call: ListAgents) -> AgentList:
        """Return the agents that changed after `since`, or all."""
        self._note_evictions()
        since = call.since if call.incarnation == self._incarnation else 0
        names = _later_than(self._changed, since) if since else self._all_names()
        gone = _later_than(self._gone, since) if since else []
        return AgentList(
            node=self.name,
            incarnation=self._incarnation,
            changes=self._changes,
            agents=tuple(self._list_agent(name) for name in names),
            since=since,
            gone=tuple(AgentName(DEFAULT_TENANT, name) for name in gone),
        )

    def _all_names(self) -> list[AgentId]:
        agents = self.cache.agents
        return [*agents, *(name for name in self._running if name not in agents)]

    def _list_agent(self, name: AgentId) -> AgentSketch:
        record = self.cache.agents.get(name) or _claim_record(self._running[name])
        is_hot = self.cache.is_hot(name)
        tokens = record.extent.tokens
        size_bytes = tokens * self.cache.bytes_per_token
        view = AgentView(
            tenant=DEFAULT_TENANT,
            agent=name,
            group=None,
            node=self.name,
            state=record.state,
            epoch=record.epoch,
            revision=record.revision,
            tokens=tokens,
            blocks=-(-tokens // BLOCK_TOKENS),
            bytes=TierBytes(size_bytes if is_hot else 0, size_bytes),
            tiers=("hot", "disk") if is_hot else ("disk",),
            busy=name in self._running,
            created_s=0.0,
            used_s=record.used_s,
            durable=True,
            tail=f"{record.extent.last:x}",
        )
        return AgentSketch(view, record.sketch)

    def _note_change(self, agent: AgentId) -> None:
        self._changes += 1
        self._changed[agent] = self._changes
        self._changed.move_to_end(agent)
        self._gone.pop(agent, None)

    def _note_evictions(self) -> None:
        for agent in self.cache.cooled:
            if agent in self.cache.agents:
                self._note_change(agent)
        self.cache.cooled.clear()
        for agent in self.cache.evicted:
            if agent not in self.cache.agents and agent not in self._running:
                self._changes += 1
                self._changed.pop(agent, None)
                self._gone[agent] = self._changes
        self.cache.evicted.clear()


def _whole_blocks(tokens: int) -> int:
    return tokens - tokens % BLOCK_TOKENS


def _claim_record(job: NodeTurn) -> KeptAgent:
    """Return the record of an agent whose first turn runs: it has nothing yet."""
    return KeptAgent(job.agent, Extent(job.prompt.content, 0), (), job.epoch, 0)


def _later_than(changes: OrderedDict[AgentId, int], since: int) -> list[AgentId]:
    """Return the agents whose latest change is later than `since`, the earliest first."""
    names: list[AgentId] = []
    for name in reversed(changes):
        if changes[name] <= since:
            break
        names.append(name)
    names.reverse()
    return names
