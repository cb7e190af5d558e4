"""Sequence's cache that cannot be cut or stored: mlx-lm's own, used once and dropped."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from fabric.errors import FabricError
from node.mlx.resident_cache import CacheMark


class OpaqueCache:
    """Cache with the interface that the engine uses of ResidentCache; it cannot be read or kept."""

    keeps_slid = False
    leaves = ()  # none is watched for NaN
    ahead = ()
    ahead_tokens = 0
    shifts = ()

    def __init__(self, model: Any) -> None:
        self.layers = make_prompt_cache(model)
        self.tokens_count = 0
        self._is_undone = False
        self.slid: dict[int, memoryview] = {}
        self.snapshots: dict[int, Any] = {}

    def _arrays(self) -> list[mx.array]:
        states = [cache.state for cache in self.layers if not cache.empty()]
        return [leaf for _, leaf in tree_flatten(states) if isinstance(leaf, mx.array)]

    @property
    def size_bytes(self) -> int:
        return sum(int(array.nbytes) for array in self._arrays())

    def settle(self) -> None:
        mx.eval(self._arrays())

    def step_outputs(self) -> list[mx.array]:
        """Return the arrays that a step changes."""
        return self._arrays()

    def advance(self, count: int) -> None:
        self.tokens_count += count

    def mark(self) -> CacheMark:
        """Return a mark that cannot be restored."""
        return CacheMark(self.tokens_count, ())

    def undo(self, mark: CacheMark) -> None:
        """Refuse further use: mlx-lm's caches have appended what the failed step computed."""
        self._is_undone = True

    def can_rewind(self, tokens_count: int) -> bool:
        """Return whether all tokens are kept, because the cache cannot be cut."""
        return tokens_count == self.tokens_count

    def rewind_point(self, limit: int) -> int:
        """Return the token count if `limit` allows all tokens, otherwise 0."""
        return self.tokens_count if self.tokens_count <= limit else 0

    def leave_batch(self) -> None:
        """Raise FabricError after a failed step: the sequence ends with its cache."""
        if self._is_undone:
            message = "the cache of a failed step cannot be used again: repeat the request"
            raise FabricError(message, code="engine_failed")

    def slide(self) -> None: ...
    def make_room(self) -> None: ...
    def rest(self) -> None: ...
    def take_snapshot(self) -> None: ...
    def reserve(self, tokens_count: int) -> None: ...
