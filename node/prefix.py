"""Find the longest reusable beginning of a prompt: resident, on disk, or others' blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric.generation import CacheTier
from fabric.ids import TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.text_match import common_prefix_items
from node.agent import Agent
from node.agent_store import Stock, stock_of, tokens_in_common
from node.mlx.resident_cache import ResidentCache
from node.prompt_plan import PromptPlan

if TYPE_CHECKING:
    from node.node import Node

ROOM_TOKENS = 512  # capacity reserved for an answer; more grows by copying


@dataclass(frozen=True, slots=True)
class Prepared:
    """A cache that holds the first `cached` tokens of the plan, and the blocks they are in."""

    plan: PromptPlan
    cache: ResidentCache
    cached: int
    tier: CacheTier
    stock: Stock
    room_tokens: int  # capacity that prompt and answer need


@dataclass(frozen=True, slots=True)
class _Source:
    """Stored blocks to restore from: whose tokens they hold and how far they reach."""

    stock: Stock
    ids: Sequence[int]
    point: int
    tier: CacheTier


async def prepare(node: "Node", agent: Agent, plan: PromptPlan, answer_tokens: int) -> Prepared:
    """Bring the reusable prefix of `plan` into a resident cache."""
    await node.prefetches.join(agent)
    resident, agent.cache = agent.cache, None
    node.note_hot()
    room = len(plan.ids) + min(answer_tokens, ROOM_TOKENS)
    usable = node.usable_prefix(min(plan.kept_tokens, len(plan.ids) - 1))
    if usable and resident is not None and resident.can_rewind(usable):
        await node.on_engine(lambda: resident.rewind(usable))
        return Prepared(
            plan, resident, usable, CacheTier.HOT, stock_of(agent.saved, agent.stored_tokens), room
        )
    source = await node.in_worker(lambda: _best_source(node, agent, plan, usable))
    # A cold prompt gets its memory when the engine admits it; what is read back is here before.
    held = max(room, len(source.ids)) if source.point else 0
    node.table.cool(node.settings.hot_bytes - node.spec.resident_bytes(held))
    fresh = await node.on_engine(lambda: node.engine.engine.new_cache(held))
    fresh.keeps_slid = node.reuses
    if not source.point:
        agent.stored_tokens = 0
        return Prepared(plan, fresh, 0, CacheTier.COLD, Stock(), room)
    tenant = agent.manifest.tenant
    cached = await node.in_worker(lambda: _load(node, tenant, source, fresh))
    agent.stored_tokens = tokens_in_common(agent.saved, source.stock, cached)
    fresh.assume(cached)
    tier = source.tier if cached else CacheTier.COLD
    return Prepared(plan, fresh, cached, tier, source.stock, room)


def _best_source(node: "Node", agent: Agent, plan: PromptPlan, usable: int) -> _Source:
    """Choose between the agent's own record and full blocks that others stored."""
    if not node.reuses:
        return _Source(Stock(), (), 0, CacheTier.COLD)
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


def _source(node: "Node", stock: Stock, ids: Sequence[int], limit: int, tier: CacheTier) -> _Source:
    if node.settings.exact_chunks:
        stock.states = {end: ref for end, ref in stock.states.items() if end % BLOCK_TOKENS == 0}
    count = -(-limit // BLOCK_TOKENS)
    stock.full = stock.full[:count]
    limit = node.usable_prefix(limit)
    return _Source(stock, ids, node.store.restore_point(stock, ids, limit), tier)


def _load(node: "Node", tenant: TenantId, source: _Source, into: ResidentCache) -> int:
    """Read as much as is good; a failing block may cost the grid of exact chunks, too."""
    loaded = node.store.load(tenant, source.ids, source.stock, source.point, into)
    usable = node.usable_prefix(loaded)
    assert usable == loaded or not into.recurrent, "states are restored where they are used"
    return usable
