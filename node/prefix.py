"""Find the longest reusable beginning of a prompt: resident, on disk, or others' blocks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric.generation import CacheTier
from fabric.ids import TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.manifest import Piece
from node.agent import Agent
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
    pieces: tuple[Piece, ...]


async def prepare(node: "Node", agent: Agent, plan: PromptPlan, answer_tokens: int) -> Prepared:
    """Bring the reusable prefix of `plan` into a resident cache."""
    usable = node.usable_prefix(min(plan.kept_tokens, len(plan.ids) - 1))
    resident, agent.cache = agent.cache, None
    own = agent.saved.pieces if agent.saved is not None else ()
    if usable and resident is not None and resident.tokens_count >= usable:
        resident.rewind(usable)
        return Prepared(plan, resident, usable, CacheTier.HOT, own)
    tenant, known = agent.manifest.tenant, plan.ids[: len(plan.ids) - 1]
    shared = await node.in_worker(lambda: node.store.shared_prefix(tenant, known))
    tier = CacheTier.PEER if agent.came_from_peer else CacheTier.DISK
    if len(shared) * BLOCK_TOKENS > usable or not own:
        usable = node.usable_prefix(len(shared) * BLOCK_TOKENS)
        own, tier, stored_ids = tuple(shared), CacheTier.DISK, plan.ids[:usable]
    else:
        # The block that holds the cut is read whole: its hash covers all its tokens.
        last = -(-usable // BLOCK_TOKENS) * BLOCK_TOKENS
        stored_ids = list(agent.manifest.token_ids[:last])
    room = max(len(plan.ids) + min(answer_tokens, ROOM_TOKENS), len(stored_ids))
    node.table.cool(node.settings.hot_bytes - room * node.spec.bytes_per_token)
    fresh = await node.on_engine(lambda: node.engine.engine.new_cache(room))
    loaded = 0
    if usable:
        loaded = await node.in_worker(lambda: _load(node, tenant, stored_ids, own, fresh))
    cached = node.usable_prefix(min(usable, loaded))
    fresh.assume(cached)
    return Prepared(plan, fresh, cached, tier if cached else CacheTier.COLD, own)


def _load(
    node: "Node", tenant: TenantId, ids: list[int], pieces: tuple[Piece, ...], into: ResidentCache
) -> int:
    return node.store.load(tenant, ids, pieces, into)
