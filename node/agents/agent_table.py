"""All agents of one node: found by key or content, listed for the router, evicted from RAM."""

import secrets
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from fabric.errors import NotFoundError, OverloadedError
from fabric.ids import AgentId, AgentKey, BlockHash, Fingerprint, NodeName, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.ports import Clock
from fabric.record.answers import Answers, OmittedParts
from fabric.record.directive import live_directives
from fabric.record.manifest import Manifest, OwnerState, is_spent
from fabric.record.piece_table import PieceTable
from fabric.retention import Candidate, Rules, choose
from fabric.turn.conversation_form import FormChain
from fabric.turn.generation import Identity, IdentityKind
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.agents.indexes import (
    AnswerIndex,
    ConversationIndex,
    FirstBlockIndex,
    FormIndex,
    SketchHistory,
    UseLog,
)
from node.agents.span_index import SpanIndex
from node.limits import AGENTS_PER_NODE_MAX, ALIKE_AGENTS_MAX, GONE_AGENTS_MAX
from node.runtime.one_loop import on_its_loop
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime

SAME_FOR_ALL = Rules()


@dataclass(frozen=True, slots=True)
class Recognized:
    """Agent whose conversation a prompt continues; perhaps in a form that supersedes its own."""

    agent: Agent
    is_superseded: bool = False


class AgentTable:
    """Agents of one node by key; used on its event loop."""

    def __init__(
        self,
        node: NodeName,
        fingerprint: Fingerprint,
        clock: Clock,
        rules: Rules = SAME_FOR_ALL,
    ) -> None:
        self._node = node
        self._fingerprint = fingerprint
        self._clock = clock
        self._agents: dict[AgentKey, Agent] = {}
        self._index = ConversationIndex()
        self._answers = AnswerIndex()
        self._forms = FormIndex()
        self._first_blocks = FirstBlockIndex()
        self._private: set[AgentKey] = set()
        self.spans = SpanIndex()
        self._rules = rules
        self.use = UseLog(clock)
        self.dropped_count = 0  # resident caches that were freed for space
        self.changes = 0
        # The number of each agent's last change, and of each removal, the oldest first.
        self._changed: OrderedDict[AgentKey, int] = OrderedDict()
        self._gone: OrderedDict[AgentKey, int] = OrderedDict()
        self._sketched: dict[AgentKey, SketchHistory] = {}
        self._gone_from = 0  # removals up to this change are no longer known

    def __iter__(self) -> Iterator[Agent]:
        return iter(list(self._agents.values()))

    def __len__(self) -> int:
        return len(self._agents)

    def get(self, key: AgentKey) -> Agent | None:
        """Return an agent in any state, or None."""
        return self._agents.get(key)

    def require(self, key: AgentKey) -> Agent:
        """Return an agent in any state; raise NotFoundError if this node does not hold it."""
        agent = self._agents.get(key)
        if agent is None:
            message = f"{self._node} does not hold this agent"
            raise NotFoundError(message, code="agent_not_found")
        return agent

    def is_copy(self, agent: Agent) -> bool:
        """Return whether another node owns the agent; False if its new owner is unknown."""
        record = agent.effective_record
        return record.state is OwnerState.REPLICA and record.owner != self._node

    @on_its_loop
    def note_change(self, key: AgentKey) -> None:
        """Count a change of an agent's listed state."""
        self.changes += 1
        if key in self._agents:
            self._changed[key] = self.changes
            self._changed.move_to_end(key)
            sketch = self._agents[key].manifest.sketch
            history = self._sketched.setdefault(key, SketchHistory())
            history.note(sketch, self.changes)
            return
        self._changed.pop(key, None)
        self._sketched.pop(key, None)
        self._gone[key] = self.changes
        self._gone.move_to_end(key)
        if len(self._gone) > GONE_AGENTS_MAX:
            self._gone_from = self._gone.popitem(last=False)[1]

    def kept_pieces(self, agent: Agent, change: int) -> int:
        """Return how many leading pieces of an agent's sketch have not changed after `change`."""
        history = self._sketched.get(agent.key)
        return history.kept_pieces(agent.manifest.sketch, change) if history is not None else 0

    def changed_after(self, change: int) -> list[tuple[int, Agent]]:
        """Return the agents that changed after `change`, each with its number, in order."""
        changes = []
        for key in reversed(self._changed):
            if self._changed[key] <= change:
                break
            changes.append((self._changed[key], self._agents[key]))
        changes.reverse()
        return changes

    def removed_after(self, change: int) -> list[tuple[int, AgentKey]] | None:
        """Return the agents removed after `change`; None if not all are known."""
        if not self._gone_from <= change <= self.changes:
            return None
        removals = []
        for key in reversed(self._gone):
            if self._gone[key] <= change:
                break
            if key not in self._agents:
                removals.append((self._gone[key], key))
        removals.reverse()
        return removals

    @on_its_loop
    def put(self, agent: Agent) -> None:
        """Add or re-index an agent after its record changed."""
        self._agents[agent.key] = agent
        self.note_change(agent.key)
        self.use.note(agent.manifest)
        self._first_blocks.put(agent.key, agent.saved)
        (self._private.add if agent.manifest.is_private else self._private.discard)(agent.key)
        self.spans.note(agent.key, None if agent.manifest.is_private else agent.saved)
        if agent.effective_record.state is OwnerState.OWNED and agent.manifest.token_ids:
            self._index.put(agent.key, agent.conversation_bytes, agent.manifest.sketch)
            answers = "" if agent.manifest.is_private else agent.manifest.provenance.answers
            self._answers.put(agent.key, answers)
            self._forms.put(agent.key, agent.manifest.form)
        else:
            self._index.remove(agent.key)
            self._forms.remove(agent.key)
            self._answers.remove(agent.key)

    @on_its_loop
    def remove(self, key: AgentKey) -> None:
        agent = self._agents.pop(key, None)
        self.note_change(key)
        if agent is not None:
            self.use.forget(agent.manifest)
        self._private.discard(key)
        self._index.remove(key)
        self._answers.remove(key)
        self._forms.remove(key)
        self._first_blocks.remove(key)
        self.spans.remove(key)

    def forget(self, agent: Agent) -> None:
        """Remove an agent, unless another one has replaced it under its key."""
        if self._agents.get(agent.key) is agent:
            self.remove(agent.key)

    def require_room(self) -> None:
        """Raise OverloadedError if the node is at its limit of agents."""
        if len(self._agents) >= AGENTS_PER_NODE_MAX:
            message = f"this node already holds {AGENTS_PER_NODE_MAX} agents; erase or move some"
            raise OverloadedError(message)

    @on_its_loop
    def create(self, tenant: TenantId, agent: AgentId, group: str | None, epoch: int) -> Agent:
        """Add an empty agent that this node owns."""
        self.require_room()
        created = self.unlisted(tenant, agent, group, epoch)
        self.put(created)
        return created

    def unlisted(self, tenant: TenantId, agent: AgentId, group: str | None, epoch: int) -> Agent:
        """Return an empty agent that is not in the table; it is dropped after its turn."""
        now_s = self._clock.wall_s()
        manifest = Manifest(
            tenant=tenant,
            agent=agent,
            fingerprint=self._fingerprint,
            owner=self._node,
            epoch=max(epoch, 1),
            revision=0,
            state=OwnerState.OWNED,
            text="",
            token_ids=U32s(),
            token_ends=U32s(),
            prompt_tokens_count=0,
            pieces=PieceTable(),
            group=group,
            created_s=now_s,
            used_s=now_s,
        )
        return Agent(manifest)

    def recognize(
        self,
        tenant: TenantId,
        identity: Identity,
        prompt: bytes,
        sketch: Sequence[int] = (),
        forms: FormChain | None = None,
    ) -> Recognized | None:
        """Find the idle conversation that `prompt` continues or repeats.

        The prompt must begin with all messages of that conversation's last request, as the client
        sent them (`sketch`) or as the template rendered them. Only the last answer may differ,
        since no later prompt has confirmed it. Or it has the messages and the answer of another
        form of it, in which clocks, reminders or results differ (`forms`). Any other prompt starts
        a new agent.
        """
        same = self._find_same(tenant, identity, prompt, sketch)
        formed = self._find_form(tenant, identity, forms)
        return _longer(same, formed)

    def find_known(
        self,
        tenant: TenantId,
        identity: Identity,
        sketch: Sequence[int],
        forms: FormChain | None,
    ) -> Agent | None:
        """Find the conversation of a request as `recognize` does, before its prompt is rendered."""
        formed = self._find_form(tenant, identity, forms)
        match = _longer(self.find_by_sketch(tenant, identity, sketch), formed)
        return match.agent if match is not None else None

    def _find_same(
        self, tenant: TenantId, identity: Identity, prompt: bytes, sketch: Sequence[int]
    ) -> Agent | None:
        repeated = self.find_by_sketch(tenant, identity, sketch)
        for agent in self._open(self._index.candidates(tenant, prompt), identity):
            if prompt.startswith(agent.conversation_bytes):
                known_tokens = repeated.manifest.prompt_tokens_count if repeated is not None else 0
                return agent if agent.manifest.prompt_tokens_count > known_tokens else repeated
        return repeated

    def find_by_sketch(
        self, tenant: TenantId, identity: Identity, sketch: Sequence[int]
    ) -> Agent | None:
        """Find the idle conversation whose last request is a prefix of the sketched messages."""
        return next(self._open(self._index.by_messages(tenant, sketch), identity), None)

    def _find_form(
        self, tenant: TenantId, identity: Identity, forms: FormChain | None
    ) -> Agent | None:
        """Find the idle conversation of which a request has all messages, perhaps rewritten."""
        if forms is None:
            return None
        candidates = self._forms.candidates(tenant, forms.beginnings())
        for agent in self._open(islice(candidates, ALIKE_AGENTS_MAX), identity):
            record = agent.manifest
            is_like = record.form is not None and forms.continues(record.form)
            if is_like and not live_directives(record.directives):
                return agent
        return None

    def answers_of(self, agent: Agent) -> Answers:
        """Return the omitted parts of answers in an agent's record."""
        return self._answers.read(agent.key, agent.manifest.provenance.answers)

    def answers_at(self, tenant: TenantId, places: Iterable[int]) -> dict[int, OmittedParts]:
        """Return the omitted parts of answers at these places, from any agent of the tenant."""
        answers: dict[int, OmittedParts] = {}
        wanted = set(places)
        holders = dict.fromkeys(self._answers.holders(tenant, sorted(wanted)))
        for key in islice(holders, ALIKE_AGENTS_MAX):
            agent_answers = self.answers_of(self._agents[key])
            answers |= {place: agent_answers[place] for place in wanted & agent_answers.keys()}
        return answers

    def _open(self, keys: Iterable[AgentKey], identity: Identity) -> Iterator[Agent]:
        """Yield the idle agents that this identity may continue."""
        for key in keys:
            agent = self._agents[key]
            is_of_group = identity.kind is IdentityKind.GROUP
            if is_of_group and agent.manifest.group != identity.agent:
                continue
            if not agent.is_busy and agent.manifest.is_found_by_content:
                yield agent

    @on_its_loop
    def records_beginning_with(self, agent: Agent, shared: Sequence[BlockRef]) -> list[Manifest]:
        """List the records of the tenant's other agents that begin with all of these blocks.

        They may share more tokens with a prompt than whole blocks. The most recently used come
        first.
        """
        if not shared:
            return []
        place, block = len(shared) - 1, shared[-1]
        others = (
            other.saved
            for key in self._first_blocks.newest(agent.key[0], shared[0].block_hash)
            if (other := self._agents[key]) is not agent
            and not other.manifest.is_private
            and other.saved is not None
            and len(other.saved.pieces) > place
            and other.saved.pieces[place].block == block
        )
        return list(islice(others, ALIKE_AGENTS_MAX))

    def has_private(self, agent: Agent) -> bool:
        """Return whether another agent of the tenant is private."""
        return any(key[0] == agent.key[0] and key != agent.key for key in self._private)

    def count_usable(
        self, agent: Agent, shared: Sequence[BlockRef], leased: Collection[BlockRef]
    ) -> int:
        """Count the leading blocks that the agent may use: its own, leased ones, and lent ones.

        A block that no record refers to yet belongs to a running turn or an incoming move, whose
        agent may be private, so it is not lent.
        """
        if agent.saved is not None and agent.saved.branches:
            leased = {*agent.saved.branch_refs}.union(leased)
        count = _in_leases(shared, 0, leased)
        first = shared[0].block_hash if shared else None
        for key in self._first_blocks.newest(agent.key[0], first) if first is not None else ():
            other = self._agents[key]
            if other.saved is None or (other is not agent and other.is_private):
                continue
            pieces = other.saved.pieces
            most = min(len(shared), len(pieces))
            while count < most and pieces[count].block == shared[count]:
                count += 1
        return _in_leases(shared, count, leased)

    def agents_beginning_with(self, tenant: TenantId, block_hash: BlockHash) -> Iterator[AgentKey]:
        """Yield the agents whose records begin with a block, the one used last first."""
        return self._first_blocks.newest(tenant, block_hash)

    def name_new(self, identity: Identity) -> AgentId:
        """Choose an unused id for a conversation without one."""
        if identity.kind is IdentityKind.CONTENT or identity.agent is None:
            return AgentId("auto-" + secrets.token_hex(8))
        # Always random: if two nodes gave the group's plain name to a new conversation, both would
        # own that agent at epoch 1.
        return AgentId(f"{identity.agent[:104]}~{secrets.token_hex(8)}")

    @property
    def hot_bytes(self) -> int:
        return sum(agent.hot_bytes for agent in self._agents.values())

    @on_its_loop
    def drop_resident(self, budget_bytes: int) -> None:
        """Free the least valuable resident caches until the rest fits; their blocks are on disk."""
        if not self._rules.tenants and self.hot_bytes <= budget_bytes:
            return
        hot = [self._candidate(a, is_fixed=not a.is_durable) for a in self if a.cache is not None]
        for dropped in choose(hot, max(0, budget_bytes), self._rules).dropped:
            self._agents[dropped.key].cache = None
            self.dropped_count += 1
            self.note_change(dropped.key)

    @on_its_loop
    def drop_unsaved(self, budget_bytes: int) -> None:
        """Free caches that the disk refused to save, least valuable first, until the rest fits.

        Such an agent loses its unsaved turns; without a saved turn, it is removed.
        """
        if self.hot_bytes <= budget_bytes:
            return
        hot = [self._candidate(a, is_fixed=False) for a in self if a.cache is not None]
        for dropped in choose(hot, max(0, budget_bytes), self._rules).dropped:
            agent = self._agents[dropped.key]
            agent.cache = None
            self.dropped_count += 1
            if agent.is_durable:
                self.note_change(agent.key)
            elif agent.saved is None:
                agent.was_evicted = True
                self.remove(agent.key)
            else:
                record, saved, agent.layout = agent.manifest, agent.saved, None
                agent.manifest = replace(
                    saved, epoch=record.epoch, owner=record.owner, state=record.state
                )
                agent.is_durable = agent.manifest == saved
                self.put(agent)

    def _candidate(self, agent: Agent, *, is_fixed: bool) -> Candidate:
        """Return a resident cache as a candidate; each byte saves the same time of disk reads."""
        record, idle_s = agent.manifest, self.use.idle_s(agent.manifest)
        return Candidate(
            agent.key,
            {agent.key: agent.hot_bytes},
            idle_s,
            self.use.reuse_probability(record),
            saves_s=float(agent.hot_bytes),
            is_active=is_fixed or agent.is_busy,
            is_pinned=record.pinned,
            is_spent=is_spent(record.settings, idle_s),
        )


def _longer(same: Agent | None, formed: Agent | None) -> Recognized | None:
    """Choose the agent that holds more of a conversation; of equals, the one in the same form."""
    if formed is None or formed is same:
        return Recognized(same) if same is not None else None
    known_tokens = same.manifest.prompt_tokens_count if same is not None else 0
    if same is not None and formed.manifest.prompt_tokens_count <= known_tokens:
        return Recognized(same)
    return Recognized(formed, is_superseded=True)


def _in_leases(shared: Sequence[BlockRef], count: int, leased: Container[BlockRef]) -> int:
    while count < len(shared) and shared[count] in leased:
        count += 1
    return count


def found_agent(record: Manifest, name: NodeName) -> Agent:
    """Return the agent of a record in the folder of the node `name`.

    A record that another node owns was copied from that node's folder: its agent is a replica.
    """
    agent = Agent(record, saved=record, is_durable=True)
    if record.owner != name and record.state is OwnerState.OWNED:
        agent.manifest = replace(record, state=OwnerState.REPLICA)
    return agent


def recovered_table(
    name: NodeName,
    fingerprint: Fingerprint,
    clock: Clock,
    store: AgentStore,
    rules: Rules,
    service_time: ServiceTime | None = None,
) -> AgentTable:
    """Recover the store and return its agents in a table; raise DiskError."""
    table = AgentTable(name, fingerprint, clock, rules)
    for record in sorted(store.recover(), key=lambda record: record.used_s):
        if service_time is not None:
            table.use.recover(record, service_time.idle_s(record))
        table.put(found_agent(record, name))
    return table
