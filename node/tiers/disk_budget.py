"""Disk budget of a node: free space before a write, and evict expired agents.

    make_room   before every block: evict the least valuable agents, or refuse the write
    enforce     at start-up and once a minute: time to live, quotas, folders of other models

When the disk is over budget, it is surveyed, and space is freed in this order: leases of shared
prefixes, branches of agents (superseded forms of their conversations), folders of other models, old
windows and states of the victims, then the victims themselves. `fabric.retention` chooses branches
and victims among the candidates that the survey found.
"""

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Awaitable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fabric.assumed_speeds import DISK_BYTES_PER_S, PREFILL_TOKENS_PER_S
from fabric.errors import FabricError
from fabric.ids import SELF_TEST_TENANT, TenantId
from fabric.record.directive import texts_bytes
from fabric.record.manifest import Manifest, is_spent
from fabric.retention import Candidate, Choice, choose, disk_capacity_bytes, tier_state
from fabric.settings import NodeSettings
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.limits import AGENTS_PER_NODE_MAX, FREE_SHARE, TRIM_ROUNDS_MAX
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from node.tiers.eviction import Eviction, is_active
from node.tiers.other_folders import OtherFolders
from node.tiers.span_leases import SpanLeases
from node.transfer.offer_book import OfferBook

FULL: Final = "the disk budget is full"
_TOKEN_RECORD_BYTES = 8  # id and end of a token in a record
_REF_RECORD_BYTES = 128

_log = logging.getLogger(__name__)


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


async def attempt(step: Awaitable[object]) -> None:
    """Run one of several steps; log its disk error instead of raising, so that the others run."""
    try:
        await step
    except (FabricError, OSError) as error:
        _log.error("cannot reclaim disk space: %s", error)


class NoRoomError(DiskError):
    """No room in the disk budget or the tenant's part of it, and nothing in it may be evicted."""

    code = "disk_budget"

    def __init__(self, size_bytes: int, *, is_tenants: bool) -> None:
        """Name the budget that is full."""
        message = (
            f"no room for {size_bytes} bytes in the tenant's part of the disk: what it stores is "
            "in use; raise node.tenants.NAME.disk_bytes or quota, or erase agents"
            if is_tenants
            else f"no room for {size_bytes} bytes: all agents on disk are in use or within their "
            "tenant's floor; raise the disk budget or erase agents"
        )
        super().__init__(message, errno.EDQUOT)
        self._is_tenants = is_tenants

    @property
    def reason(self) -> str:
        """Report the problem without a name of an agent or a tenant: health is public."""
        return "a tenant's part of the disk is full" if self._is_tenants else FULL


class SaveReservation:
    """Bytes granted to one save for blocks that no record refers to yet; none at first."""

    def __init__(self, budget: "DiskBudget", tenant: TenantId) -> None:
        self._budget = budget
        self._tenant = tenant
        self._size_bytes = 0

    async def add(self, size_bytes: int) -> None:
        """Reserve more bytes; raise NoRoomError."""
        await self._budget.make_room(self._tenant, size_bytes)
        self._note(size_bytes)

    async def add_free(self, size_bytes: int) -> bool:
        """Reserve more bytes if they are free, without evicting; return whether they were."""
        if not await self._budget.take_free(self._tenant, size_bytes):
            return False
        self._note(size_bytes)
        return True

    def _note(self, size_bytes: int) -> None:
        self._budget.pending[self._tenant] += size_bytes
        self._size_bytes += size_bytes

    def end(self) -> None:
        """End the reservation: a record refers to the blocks now, or the save has failed."""
        self._budget.pending[self._tenant] -= self._size_bytes
        self._size_bytes = 0


class DiskBudget:
    """Space of a node's disk tier; used on its event loop."""

    def __init__(
        self,
        settings: NodeSettings,
        table: AgentTable,
        store: AgentStore,
        workers: Workers,
        survey: DiskSurvey,
        eviction: Eviction,
        others: OtherFolders,
        leases: SpanLeases,
    ) -> None:
        self._rules = replace(settings.rules, ttl_s=settings.disk_ttl_s, is_disk=True)
        self._table = table
        self._store = store
        self._workers = workers
        self._disk = survey
        self._eviction = eviction
        self._others = others
        self._leases = leases
        self._stands: Choice | None = None  # free bytes found by the last survey
        self._since: Counter[TenantId] = Counter()  # bytes granted since that survey
        self._turn = asyncio.Lock()
        self.pending: Counter[TenantId] = Counter()
        self.evicted_count = 0

    async def enforce(self) -> None:
        """Enforce every limit now; log a failing disk."""
        async with self._turn:
            self._leases.expire()
            for step in (self._others.measure, self._fit, lambda: self._fit_count(None)):
                await attempt(step())

    @property
    def free_bytes(self) -> int:
        """Free bytes of the budget at the last survey, minus bytes granted since."""
        free_bytes = self._stands.free_bytes if self._stands is not None else 0.0
        return max(0, int(free_bytes) - self._since.total())

    async def make_room(
        self, tenant: TenantId, size_bytes: int, *, replicas_only: bool = False
    ) -> None:
        """Grant `size_bytes` to `tenant`, evicting if necessary; raise NoRoomError if that fails.

        With `replicas_only`, evict replicas only.
        """
        if tenant == SELF_TEST_TENANT or self._take(tenant, size_bytes):
            return
        async with self._turn:
            if self._take(tenant, size_bytes):
                return
            await self._fit((tenant, size_bytes), replicas_only=replicas_only)
            if not self._take(tenant, size_bytes):
                is_tenants = size_bytes <= self.free_bytes
                raise NoRoomError(size_bytes, is_tenants=is_tenants)

    async def take_free(self, tenant: TenantId, size_bytes: int) -> bool:
        """Grant `size_bytes` if they are free, without evicting; return whether they were."""
        if self._take(tenant, size_bytes):
            return True
        async with self._turn:
            wish = (tenant, size_bytes)
            self._keep(await self._survey(wish), wish)
            return self._take(tenant, size_bytes)

    async def make_place(self, tenant: TenantId) -> None:
        """Evict an agent if the node is at its limit of agents; raise DiskError."""
        if len(self._table) >= AGENTS_PER_NODE_MAX:
            async with self._turn:
                if len(self._table) >= AGENTS_PER_NODE_MAX:
                    await self._fit_count(tenant)

    def _take(self, tenant: TenantId, size_bytes: int) -> bool:
        """Grant bytes if the last survey shows them as free; return whether they were."""
        stands = self._stands
        if stands is None:
            return False
        quota_free_bytes = stands.quota_free_bytes.get(tenant, 0.0)
        is_free = (
            self._since.total() + size_bytes <= stands.free_bytes
            and self._since[tenant] + size_bytes <= quota_free_bytes
        )
        if is_free:
            self._since[tenant] += size_bytes
        return is_free

    # --- bytes -------------------------------------------------------------------------------

    async def _fit(
        self, wish: tuple[TenantId, int] | None = None, *, replicas_only: bool = False
    ) -> None:
        """Remove leases, folders, old states and agents until everything fits, `wish` included."""
        tier = await self._survey_after_sweep(wish)
        if tier.is_crowded(self._rules.ttl_s) and self._leases.release_all():
            tier = await self._survey_after_sweep(wish)
        tier = await self._without_branches(tier, wish)
        if replicas_only:
            chosen = await self._choose_victims(tier.replicas_only())
            self.evicted_count += await self._eviction.evict(chosen)
            self._keep(await self._survey(wish), wish)
            return
        for folder in list(self._others.found):
            if not tier.is_crowded(self._rules.ttl_s):
                break
            await self._others.remove(folder)
            tier = await self._survey(wish)
        chosen = await self._choose_victims(tier)
        if chosen and len(self._store.spec.groups) > 1:
            for _ in range(TRIM_ROUNDS_MAX):
                if not await self._trim(chosen):
                    break
                chosen = await self._choose_victims(await self._survey(wish))
        if chosen:
            self.evicted_count += (count := await self._eviction.evict(chosen))
            _log.info("evicted %d agents", count)
            tier = await self._survey(wish)
        self._keep(tier, wish)

    async def _without_branches(
        self, tier: DiskTier, wish: tuple[TenantId, int] | None
    ) -> DiskTier:
        """Drop the branches that retention chooses; return the tier as it is then."""
        if not any(candidate.is_superseded for candidate in tier.candidates):
            return tier
        superseded = [c.key for c in (await self._choice(tier)).dropped if c.is_superseded]
        agents = [agent for key in superseded if (agent := self._table.get(key)) is not None]
        if not agents or not await self._eviction.drop_branches(agents):
            return tier
        return await self._survey(wish)

    async def _survey_after_sweep(self, wish: tuple[TenantId, int] | None) -> DiskTier:
        # Failed saves leave unreferenced blocks, and no record's publish sweeps them.
        with suppress(DiskError):
            await self._workers.run(self._store.blocks.sweep)
        return await self._survey(wish)

    async def _survey(self, wish: tuple[TenantId, int] | None) -> DiskTier:
        incoming = +self.pending
        if wish is not None:
            incoming[wish[0]] += wish[1]
        others_bytes = self._others.size_bytes
        return await self._disk.look(others_bytes, self.pending.total(), incoming)

    async def _choice(self, tier: DiskTier) -> Choice:
        return await self._workers.run(
            lambda: choose(
                tier.candidates,
                tier.capacity_bytes,
                self._rules,
                incoming=tier.incoming,
                free_share=FREE_SHARE,
            )
        )

    async def _choose_victims(self, tier: DiskTier) -> list[Agent]:
        """Choose the agents to evict."""
        dropped = (
            victim.key for victim in (await self._choice(tier)).dropped if not victim.is_superseded
        )
        return [agent for key in dropped if (agent := self._table.get(key)) is not None]

    async def _trim(self, chosen: list[Agent]) -> int:
        """Remove old windows and states of the chosen agents, so that fewer must be evicted."""
        use, count = self._table.use, 0
        for agent in chosen:
            if use.idle_s(agent.manifest) > self._rules.ttl_s:
                continue
            try:
                count += await self._eviction.trim(agent)
            except (FabricError, OSError) as error:  # such as a full drive; then it is evicted
                _log.warning("cannot trim an agent's old states: %s", error)
        return count

    def _keep(self, tier: DiskTier, wish: tuple[TenantId, int] | None) -> None:
        """Store the free bytes of a survey, which counted `wish` although it is not granted yet."""
        stands = tier_state(
            tier.candidates, tier.capacity_bytes, self._rules, incoming=tier.incoming
        )
        counted = Counter(tier.incoming)
        if wish is not None:
            counted[wish[0]] -= wish[1]
            quotas = dict(stands.quota_free_bytes)
            quotas[wish[0]] += wish[1]
            stands = replace(
                stands, free_bytes=stands.free_bytes + wish[1], quota_free_bytes=quotas
            )
        self._stands = stands
        self._since = self.pending - counted  # granted while the survey ran
        for agent in self._table:
            is_held = agent.key in stands.held
            if agent.is_pin_held != is_held:
                agent.is_pin_held = is_held
                self._table.note_change(agent.key)

    # --- the number of agents ----------------------------------------------------------------

    async def _fit_count(self, tenant: TenantId | None) -> None:
        """Evict agents over the limit on their number, regardless of their sizes."""
        if len(self._table) + (tenant is not None) <= AGENTS_PER_NODE_MAX:
            return
        alike = DiskTier(
            [
                replace(c, pieces={c.key: 1})
                for c in (await self._survey(None)).candidates
                if not c.is_superseded
            ],
            AGENTS_PER_NODE_MAX,
            {tenant: 1} if tenant is not None else {},
        )
        self.evicted_count += await self._eviction.evict(await self._choose_victims(alike))
