"""Starting point of a turn: its plan, and the cache that it begins with."""

from dataclasses import dataclass
from typing import Final, cast

from fabric.kvcache.arrangement import Move
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.limits import BLOCK_TOKENS
from fabric.record.layout import Layout
from fabric.turn.generation import CacheTier
from fabric.turn.prompt_plan import PromptPlan
from node.mlx.resident_cache import ResidentCache


class UnmadeCache:
    """Placeholder for a cache that is created once its memory is granted."""

    tokens_count = 0
    ahead_tokens = 0
    size_bytes = 0


UNMADE_CACHE: Final = cast("ResidentCache", UnmadeCache())


@dataclass(frozen=True, slots=True)
class Prepared:
    """Cache for a plan, of whose prompt it holds the first `cached` tokens.

    `layout` lists the stored ones with their blocks: all of them if the cache is read from disk.
    Once its memory is granted, such a cache is created, and a resident one is rewound.
    """

    plan: PromptPlan
    cache: ResidentCache
    cached: int
    tier: CacheTier
    layout: Layout
    room_tokens: int  # capacity that prompt and answer need
    is_kept: bool = True  # blocks that slide out of its windows are saved
    is_stored: bool = False  # its layout is read from the disk
    moves: tuple[Move, ...] = ()  # moves by which a resident cache is edited now
    plain_plan: PromptPlan | None = None  # plan without borrowed spans, if the layout has any
    fetched_tokens: int = 0  # cached tokens that another node sent while the turn waited

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.cached + sum(end - start for start, end in self.layout.arrangement.ahead)

    def waiting_bytes(self, spec: ModelCacheSpec) -> int:
        """Return the memory that windows before holes need in addition to the cache's."""
        window = spec.window_tokens + BLOCK_TOKENS
        tokens = sum(min(end - start, window) for start, end in self.layout.arrangement.ahead)
        return spec.kv_bytes(tokens, CacheGroup.WINDOW)

    @property
    def amortized_tokens(self) -> int:
        """Reused tokens that were computed without the edit before them."""
        return self.reused_tokens - self.layout.exact_tokens if self.layout.is_edited else 0


def stored_prefix(
    plan: PromptPlan,
    layout: Layout,
    tier: CacheTier,
    room_tokens: int,
    *,
    is_kept: bool,
    plain_plan: PromptPlan | None = None,
) -> Prepared:
    """Prepare a turn that reads its layout from the disk once its memory is granted."""
    return Prepared(
        plan,
        UNMADE_CACHE,
        layout.arrangement.tokens_count,
        tier,
        layout,
        max(room_tokens, layout.tokens_count),
        is_kept,
        is_stored=True,
        plain_plan=plain_plan,
    )
