"""Shared prefixes that this node offers to nodes that lack them.

    alice  [ system ][ tools ][ …      all three begin with `system`, two with `tools` after it:
    bob    [ system ][ tools ][ …      a new agent may continue from either end
    carol  [ system ][ …

Prefixes are counted by block names, which follow from tenant, model and tokens: a prefix is one
tenant's, and contains no edited tokens. Only agents that this node owns and that are not private
count. Nothing of the agents themselves changes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate, takewhile

from fabric.control.agent_at import OfferRequest
from fabric.control.span_calls import OfferSpans, SpanOffer, SpanOffers
from fabric.ids import SELF_TEST_TENANT, AgentKey, BlockHash
from fabric.limits import BLOCK_TOKENS, SPAN_SHARERS_MIN
from fabric.record.layout import Layout, unedited_layout, unedited_pieces
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.stored_part import trim_restore_points
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import SPAN_LENDERS_MAX, SPAN_OFFERS_MAX, SPAN_TRIES_MAX
from node.migration.record_offers import RecordOffers
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The record of a prefix that `sharers` agents have, without an agent's text."""

    record: Manifest
    sharers: int


def shared_prefixes(
    store: AgentStore, records: Sequence[Manifest], bytes_max: int
) -> list[SharedPrefix]:
    """Choose shared prefixes of these records, the most shared first; reads no disk."""
    chains = [whole_blocks(record) for record in records]
    counts = Counter(name for chain in chains for name in chain)
    ends: dict[BlockHash, list[tuple[Manifest, int]]] = defaultdict(list)
    for lender, chain in zip(records, chains, strict=True):
        for name, count in _ends(chain, counts):
            ends[name].append((lender, count))
    prefixes: list[SharedPrefix] = []
    taken: set[object] = set()
    size_bytes = 0
    for name in sorted(ends, key=lambda name: (-counts[name], ends[name][0][1])):
        room_bytes = bytes_max - size_bytes
        fitting = (
            (record, min(count, _fitting(record, taken, room_bytes)))
            for record, count in ends[name][:SPAN_TRIES_MAX]
        )
        cuts = (cut_record(store, record, count) for record, count in fitting)
        record = next((cut for cut in cuts if cut is not None), None)
        if record is None:
            continue
        more = set(record.refs) - taken
        more_bytes = sum(ref.payload_bytes for ref in more)
        if not more or size_bytes + more_bytes > bytes_max:
            continue
        taken.update(more)
        size_bytes += more_bytes
        prefixes.append(SharedPrefix(record, counts[name]))
        if len(prefixes) == SPAN_OFFERS_MAX:
            break
    return prefixes


def whole_blocks(record: Manifest) -> list[BlockHash]:
    """Return the names of a record's first full blocks, up to its first edit."""
    blocks = unedited_pieces(record).blocks
    return [ref.block_hash for ref in blocks if ref.tokens_count == BLOCK_TOKENS]


def _ends(
    chain: Sequence[BlockHash], counts: Counter[BlockHash]
) -> Iterator[tuple[BlockHash, int]]:
    """Yield the last block of each shared prefix, and the number of its blocks."""
    for at, name in enumerate(chain, 1):
        if counts[name] < SPAN_SHARERS_MIN:
            return
        if at == len(chain) or counts[chain[at]] < counts[name]:
            yield name, at


def _fitting(record: Manifest, taken: AbstractSet[object], room_bytes: int) -> int:
    """Count the first blocks of a record that fit in addition to those already taken."""
    sizes = (0 if ref in taken else ref.payload_bytes for ref in record.pieces.blocks)
    return sum(1 for _ in takewhile(lambda end: end <= room_bytes, accumulate(sizes)))


def cut_record(store: AgentStore, record: Manifest, blocks_count: int) -> Manifest | None:
    """Cut a record at the last point within its first blocks from which a turn can continue."""
    layout = unedited_layout(record, blocks_count * BLOCK_TOKENS)
    return prefix_record(store, record, record.token_ids, layout)


def prefix_record(
    store: AgentStore, lender: Manifest, ids: Sequence[int], layout: Layout
) -> Manifest | None:
    """Return the record of a layout's whole blocks, without text, as far as a turn can continue."""
    # Only full blocks are found by name, so only states at their ends are of use.
    states = tuple(state for state in layout.states if state.end % BLOCK_TOKENS == 0)
    layout = replace(layout, states=states)
    if store.blocks.missing(layout.refs):
        return None
    layout = store.restorable(layout)
    count = layout.tokens_count
    if not count:
        return None
    cut = Manifest(
        tenant=lender.tenant,
        agent=lender.agent,
        fingerprint=lender.fingerprint,
        owner=lender.owner,
        epoch=lender.epoch,
        revision=lender.revision,
        state=OwnerState.REPLICA,
        text="",
        token_ids=U32s(ids[:count]),
        token_ends=U32s([0] * count),
        prompt_tokens_count=0,
        pieces=layout.pieces,
        windows=layout.windows,
        states=layout.states,
    )
    return trim_restore_points(cut, store.spec.window_tokens)


@dataclass(frozen=True, slots=True)
class SharedPrefixSource:
    """Offers of a node's shared prefixes to other nodes."""

    identity: NodeIdentity
    table: AgentTable
    store: AgentStore
    erased: TombstoneStore
    workers: Workers
    offers: RecordOffers
    health: Health

    async def offer(self, call: OfferSpans) -> SpanOffers:
        """Offer the most shared prefixes, up to the configured number of bytes."""
        bytes_max = self.identity.settings.popular_bytes
        if not bytes_max or not self.health.reuses:
            return SpanOffers(())
        records = self._shared_records()
        prefixes = await self.workers.run(lambda: shared_prefixes(self.store, records, bytes_max))
        offers = []
        for prefix in prefixes:
            record = prefix.record
            if not self.is_still_shared(record.key, record.epoch):
                continue
            request = OfferRequest(*record.key, record.epoch, call.migration, call.target)
            offer = self.offers.add(request, record)
            offers.append(SpanOffer(*record.key, offer, prefix.sharers))
        return SpanOffers(tuple(offers))

    def _shared_records(self) -> list[Manifest]:
        """Return the records of agents that may be shared, the most recently used first."""
        agents = (agent for agent in self.table if self.may_share(agent))
        last = nlargest(SPAN_LENDERS_MAX, agents, key=lambda agent: agent.manifest.used_s)
        # The record on disk may be of an earlier epoch, until a turn has ended in this one.
        return [self.shared_record(agent) for agent in last]

    def shared_record(self, agent: Agent) -> Manifest:
        """Return the record of an agent that may be shared, under its present epoch."""
        assert agent.saved is not None, "an agent without a record shares nothing"
        return replace(agent.saved, epoch=agent.manifest.epoch, owner=self.identity.name)

    def may_share(self, agent: Agent) -> bool:
        """Return whether other nodes may have the beginning of this agent's record."""
        record, saved = agent.effective_record, agent.saved
        return (
            saved is not None
            and record.state is OwnerState.OWNED
            and record.tenant != SELF_TEST_TENANT
            and not (agent.manifest.is_private or saved.is_private)
            and not self.erased.is_erased(agent.key, record.epoch)
        )

    def is_still_shared(self, key: AgentKey, epoch: int) -> bool:
        """Return whether an agent may still be shared, and is at the same epoch."""
        agent = self.table.get(key)
        return agent is not None and self.may_share(agent) and agent.manifest.epoch == epoch
