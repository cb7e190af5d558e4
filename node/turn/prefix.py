"""Find the longest reusable beginning of a prompt: resident, on disk, or others' blocks.

Nothing is taken, made or read before the engine has granted the memory for it: `prepare` says
what there is, `begin` (on the engine thread) and `restore` make it so.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from fabric.ids import TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import CacheTier
from fabric.turn.prompt_plan import PromptPlan
from fabric.turn.text_match import common_prefix_items
from node.agents.agent import Agent
from node.mlx.resident_cache import ResidentCache
from node.store.stock import Stock, stock_of, tokens_in_common
from node.tiers.restore import load_blocks

if TYPE_CHECKING:
    from node.node import Node

ROOM_TOKENS = 512  # capacity reserved for an answer; more grows by copying


class _NotMade:
    """Stands for a cache that is made when its memory is granted."""

    tokens_count = 0
    size_bytes = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Stored blocks to restore from: whose tokens they hold and how far they reach."""

    stock: Stock
    ids: Sequence[int]
    point: int
    tier: CacheTier


@dataclass(frozen=True, slots=True)
class Prepared:
    """A cache for a plan, and the blocks that its first `cached` tokens are in.

    Until `source` is restored, the cache is not made; a resident one is rewound when its
    sequence is granted its memory.
    """

    plan: PromptPlan
    cache: ResidentCache
    cached: int
    tier: CacheTier
    stock: Stock
    room_tokens: int  # capacity that prompt and answer need
    source: Source | None = None  # to be read back

    def begin(self, node: "Node") -> ResidentCache:
        """Return the cache, with room for prompt and answer; runs on the engine thread."""
        if self.source is not None:
            made = node.engine.engine.new_cache(self.room_tokens)
            made.keeps_slid = node.reuses
            return made
        self.cache.rewind(self.cached)
        self.cache.reserve(self.room_tokens)
        return self.cache


async def prepare(node: "Node", agent: Agent, plan: PromptPlan, answer_tokens: int) -> Prepared:
    """Find what serves `plan`; the agent's own cache, if it has one, stays as it is."""
    await node.prefetches.join(agent)
    resident = agent.cache
    room = len(plan.ids) + min(answer_tokens, ROOM_TOKENS)
    usable = node.usable_prefix(min(plan.kept_tokens, len(plan.ids) - 1))
    hot = resident.rewind_point(usable) if resident is not None else 0
    hot = hot if node.usable_prefix(hot) == hot else 0
    source = None
    # Of a recurrent model an earlier state may be in memory, and a later one on disk.
    if not hot or hot < usable:
        source = await node.in_worker(lambda: _best_source(node, agent, plan, usable))
    if hot and resident is not None and (source is None or source.point <= hot):
        stock = stock_of(agent.saved, agent.stored_tokens)
        return Prepared(plan, resident, hot, CacheTier.HOT, stock, room)
    assert source is not None, "what is not hot comes from elsewhere"
    if source.point:
        not_made = cast("ResidentCache", _NotMade())
        room = max(room, len(source.ids))
        return Prepared(plan, not_made, source.point, source.tier, source.stock, room, source)
    fresh = await node.on_engine(lambda: node.engine.engine.new_cache(0))
    fresh.keeps_slid = node.reuses
    return Prepared(plan, fresh, 0, CacheTier.COLD, Stock(), room)


async def restore(
    node: "Node",
    agent: Agent,
    prepared: Prepared,
    cache: ResidentCache,
    cancel: threading.Event,
) -> Prepared:
    """Read the prefix into the new `cache`; what turns out to be damaged is a miss.

    Where `cancel` is set, nothing more is read.
    """
    source, tenant = prepared.source, agent.manifest.tenant
    assert source is not None, "only what is stored is restored"
    cached = await node.in_worker(lambda: _load(node, tenant, source, cache, cancel))
    agent.stored_tokens = tokens_in_common(agent.saved, source.stock, cached)
    cache.assume(cached)
    tier = source.tier if cached else CacheTier.COLD
    return replace(prepared, cache=cache, cached=cached, tier=tier, source=None)


def _best_source(node: "Node", agent: Agent, plan: PromptPlan, usable: int) -> Source:
    """Choose between the agent's own record and full blocks that others stored."""
    if not node.reuses:
        return Source(Stock(), (), 0, CacheTier.COLD)
    known = plan.ids[: len(plan.ids) - 1]
    shared = node.store.shared_stock(agent.manifest.tenant, known)
    others = _source(node, shared, known, len(known), CacheTier.DISK)
    if agent.saved is None:
        return others
    ids = list(agent.saved.token_ids)
    limit = min(usable, common_prefix_items(plan.ids, ids))
    # The block that holds the cut is read whole: its hash covers all its tokens.
    ids = ids[: -(-limit // BLOCK_TOKENS) * BLOCK_TOKENS]
    tier = CacheTier.PEER if agent.came_from_peer else CacheTier.DISK
    own = _source(node, stock_of(agent.saved), ids, limit, tier)
    return own if own.point >= others.point else others


def _source(node: "Node", stock: Stock, ids: Sequence[int], limit: int, tier: CacheTier) -> Source:
    if node.settings.exact_chunks:
        stock.states = {end: ref for end, ref in stock.states.items() if end % BLOCK_TOKENS == 0}
    count = -(-limit // BLOCK_TOKENS)
    stock.full = stock.full[:count]
    limit = node.usable_prefix(limit)
    return Source(stock, ids, node.store.restore_point(stock, ids, limit), tier)


def _load(
    node: "Node",
    tenant: TenantId,
    source: Source,
    into: ResidentCache,
    cancel: threading.Event,
) -> int:
    """Read as much as is good; a failing block may cost the grid of exact chunks, too."""
    stock, point = source.stock, source.point
    loaded = load_blocks(node.store, tenant, source.ids, stock, point, into, cancel=cancel)
    usable = node.usable_prefix(loaded)
    assert usable == loaded or not into.recurrent, "states are restored where they are used"
    return usable
