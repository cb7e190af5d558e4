"""Contents of a node's disk: the candidates that retention chooses from."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fabric.assumed_speeds import DISK_BYTES_PER_S, PREFILL_TOKENS_PER_S
from fabric.ids import TenantId
from fabric.record.directive import texts_bytes
from fabric.record.manifest import Manifest, is_spent
from fabric.retention import Candidate, disk_capacity_bytes
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.eviction import is_active
from node.transfer.offer_book import OfferBook

_TOKEN_RECORD_BYTES = 8  # id and end of a token in a record
_REF_RECORD_BYTES = 128


@dataclass(frozen=True, slots=True)
class DiskTier:
    """Agents on a disk, its capacity for them, and the bytes about to be written."""

    candidates: Sequence[Candidate]
    capacity_bytes: int
    incoming: Mapping[TenantId, int]

    def replicas_only(self) -> "DiskTier":
        """Return the tier with all but replicas and branches protected from eviction."""
        kept = [
            c if c.is_replica or c.is_superseded else replace(c, is_active=True)
            for c in self.candidates
        ]
        return replace(self, candidates=kept)

    def is_crowded(self, ttl_s: float) -> bool:
        """Return whether unexpired agents need more than the capacity."""
        needed: dict[Hashable, int] = {}
        for candidate in self.candidates:
            if candidate.idle_s <= ttl_s or candidate.is_active:
                needed.update(candidate.pieces)
        return sum(needed.values()) + sum(self.incoming.values()) > self.capacity_bytes


@dataclass(frozen=True, slots=True)
class DiskSurvey:
    """Survey of a node's disk, before a choice of victims."""

    table: AgentTable
    store: AgentStore
    workers: Workers
    offers: OfferBook
    engine: EngineThread
    limit_bytes: int

    async def look(
        self, others_bytes: int, pending_bytes: int, incoming: Mapping[TenantId, int]
    ) -> DiskTier:
        """Measure the disk; `others_bytes`: other models' folders; `pending_bytes`: unrecorded."""
        offered, blocks = self.offers.agents(), self.store.blocks
        met = [
            (agent.saved, self._candidate(agent, is_active(agent, offered))) for agent in self.table
        ]

        def look() -> DiskTier:
            sizes, drive = blocks.sizes(), blocks.drive()
            candidates = [replace(c, pieces=_pieces(c, record, sizes)) for record, c in met]
            candidates += _branches(met, sizes)
            records_bytes = sum(record_bytes(record) for record, _ in met if record is not None)
            needed = {name for candidate in candidates for name in candidate.pieces}
            # Blocks that no record refers to yet: those of turns, also in `incoming`, and of moves.
            loose_bytes = sum(size for ref, size in sizes.items() if ref not in needed)
            stored_bytes = sum(sizes.values()) + records_bytes + others_bytes
            room_bytes = disk_capacity_bytes(drive.total_bytes, drive.free_bytes, stored_bytes)
            capacity_bytes = min(self.limit_bytes, room_bytes) - others_bytes
            capacity_bytes -= max(0, loose_bytes - pending_bytes)
            return DiskTier(candidates, max(0, capacity_bytes), incoming)

        return await self.workers.run(look)

    def _candidate(self, agent: Agent, active: bool) -> Candidate:  # noqa: FBT001
        """Describe an agent as a candidate, without its bytes."""
        record, use = agent.manifest, self.table.use
        speed = self.engine.prefill_speed.per_s or PREFILL_TOKENS_PER_S
        read_s = self.store.spec.bytes_per_token / DISK_BYTES_PER_S
        saves_s = record.tokens_count * (1 / speed - read_s)
        is_replica = self.table.is_copy(agent)  # its owner serves it
        idle_s = use.idle_s(record)
        return Candidate(
            agent.key,
            {},
            idle_s,
            use.reuse_probability(record),
            max(0.0, saves_s),
            is_active=active,
            is_pinned=record.pinned and not is_replica,
            is_replica=is_replica,
            is_spent=is_spent(record.settings, idle_s),
        )


def record_bytes(record: Manifest) -> int:
    """Estimate the size of a record's file."""
    tokens_bytes = _TOKEN_RECORD_BYTES * record.tokens_count
    notes_bytes = len(record.provenance.answers) + len(record.provenance.turns)
    return (
        len(record.text)
        + notes_bytes
        + texts_bytes(record.directives or ())
        + tokens_bytes
        + _REF_RECORD_BYTES * len(record.kept_refs)
    )


def _branches(
    met: Iterable[tuple[Manifest | None, Candidate]], sizes: Mapping[Hashable, int]
) -> Iterator[Candidate]:
    """Yield the superseded forms of agents, as separate candidates."""
    for record, agent in met:
        refs = record.branch_refs if record is not None else []
        if refs:
            pieces: dict[Hashable, int] = {ref: sizes.get(ref, 0) for ref in refs}
            yield replace(agent, pieces=pieces, is_pinned=False, is_superseded=True)


def _pieces(
    candidate: Candidate, record: Manifest | None, sizes: Mapping[Hashable, int]
) -> dict[Hashable, int]:
    if record is None:
        return {}
    blocks: dict[Hashable, int] = {ref: sizes.get(ref, 0) for ref in record.refs}
    return blocks | {candidate.key: record_bytes(record)}
