"""What a turn begins with: its plan, and where the cache for it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from fabric.kvcache.arrangement import Move
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.limits import BLOCK_TOKENS
from fabric.record.layout import Layout
from fabric.turn.generation import CacheTier
from fabric.turn.prompt_plan import PromptPlan
from node.mlx.resident_cache import ResidentCache
from node.store.available_blocks import AvailableBlocks


class NotMade:
    """Stands for a cache that is made when its memory is granted."""

    tokens_count = 0
    ahead_tokens = 0
    size_bytes = 0


NOT_MADE: Final = cast("ResidentCache", NotMade())


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Stored blocks to restore from: whose tokens they hold and how far they reach."""

    available: AvailableBlocks
    ids: Sequence[int]
    point: int
    tier: CacheTier
    common_tokens: int = 0  # of the prompt, with what was computed before; not all may serve
    layout: Layout | None = None  # of an edited cache: read this, and not `available`
    plain_plan: PromptPlan | None = None  # without borrowed spans, if the layout has any


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
    available: AvailableBlocks
    room_tokens: int  # capacity that prompt and answer need
    source: CachedPrefix | None = None  # to be read back
    is_kept: bool = True  # so what slides out of its windows is saved
    layout: Layout | None = None  # of an edited cache
    moves: tuple[Move, ...] = ()  # of a resident cache that is edited now

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that need not be computed."""
        ahead = self.layout.arrangement.ahead if self.layout is not None else ()
        return self.cached + sum(end - start for start, end in ahead)

    def waiting_bytes(self, spec: ModelCacheSpec) -> int:
        """Return the memory of what window layers see in front of holes, beside the cache's."""
        ahead = self.layout.arrangement.ahead if self.layout is not None else ()
        window = spec.window_tokens + BLOCK_TOKENS
        tokens = sum(min(end - start, window) for start, end in ahead)
        return spec.kv_bytes(tokens, CacheGroup.WINDOW)

    @property
    def amortized_tokens(self) -> int:
        """Of these, those that know nothing of an edit in front of them."""
        return self.reused_tokens - self.layout.exact_tokens if self.layout is not None else 0
