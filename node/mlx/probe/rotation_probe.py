"""Trial of key rotation: which stored dimensions depend on the position, and how to rotate them.

The model runs a few tokens at position 0 and at two others, with recording caches. Its modules'
rotary embedding settings are only candidates. A candidate is accepted if rotating the rows of
position 0 gives the rows of the other positions, in every dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from fabric.kvcache.rotation import INDEX, KEYS, VALUES, CacheRotations, Rotation, UnknownRotation
from node.mlx.rotate import rotate


class RecordingCache:
    """Stand-in for one layer's cache at a chosen position.

    Attention gets zeros back, so its result is zero at every position: no layer's input depends
    on the position, in any precision, and what a layer stores differs by its own doing alone.
    """

    def __init__(self, upstream: Any, position: int) -> None:
        self._upstream = upstream  # source of attributes such as a window's size
        self.offset = position
        self.start_position = position  # for a chunked cache: it holds nothing before
        self.keys: mx.array | None = None  # a model may set these two later, as an indexer does
        self.values: mx.array | None = None
        self.writes_count = 0
        self._shown: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record `[rows, heads, tokens, width]`; return zeros of these shapes."""
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        self.writes_count += 1
        self._shown = (mx.zeros_like(keys), mx.zeros_like(values))
        return self._shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return zeros to layers that share this layer's cache."""
        assert self._shown is not None, "read before it was written"
        return self._shown

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return no mask, because one token attends to itself only."""
        assert n == 1, "the recording shows one token per row"


# One token per row: then attention needs no mask and rows are exact in half precision too.
_TOKENS = (3, 7, 12, 18, 25, 33, 42, 52)
_NEAR_POSITION = 37
# Past today's declared lengths, where embeddings that stretch with the length differ.
_FAR_POSITION = 1_048_583

Caches: TypeAlias = list[Any]


@dataclass(frozen=True, slots=True)
class _Store:
    """One recorded array: its slot, and its rows `[rows, heads, 1, width]` at each position."""

    slot: str | None  # None: no slot that a Rotation could name
    label: str
    rows: dict[int, mx.array]


def read_rotations(
    model: Any, make_caches: Callable[[], Caches] | None = None
) -> list[CacheRotations]:
    """Return for each plain prompt cache of `model` the rotation of its rows.

    Empty for recurrent layers and for rows that fit every position; UnknownRotation where no
    rotation explains the experiment. `make_caches` builds fresh caches as mlx-lm would.
    """
    fresh = make_caches or (lambda: make_prompt_cache(model))
    try:
        runs = {position: _record(model, fresh(), position) for position in (0, _NEAR_POSITION)}
        candidates = list(_candidates(model))
        # A table of absolute positions rotates no row; far positions would read out of bounds.
        if any(isinstance(found, tuple) and found for found in _explain_all(runs, candidates)):
            runs[_FAR_POSITION] = _record(model, fresh(), _FAR_POSITION)
        return list(_explain_all(runs, candidates))
    except Exception as error:  # noqa: BLE001 - the model may be usable without it
        why = f"the model does not run at a chosen position ({type(error).__name__}: {error})"
        return [UnknownRotation(why[:300]) for cache in fresh() for _ in _cache_members(cache)]


# --- the experiment --------------------------------------------------------------------------


def _record(model: Any, caches: Caches, position: int) -> Caches:
    recorders = [_recorder(cache, position) for cache in caches]
    model(mx.array(_TOKENS)[:, None], cache=recorders)
    members = [member for cache in recorders for member in _members(cache)]
    # Only stored values are evaluated, never the logits.
    mx.eval([array for m in members for array in (m.keys, m.values) if array is not None])
    return recorders


def _recorder(cache: Any, position: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_recorder(member, position) for member in cache.caches))
    if isinstance(cache, ArraysCache) or not hasattr(cache, "update_and_fetch"):
        return cache
    return RecordingCache(cache, position)


def _cache_members(cache: Any) -> tuple[Any, ...]:
    return tuple(cache.caches) if isinstance(cache, CacheList) else (cache,)


def _members(cache: Any) -> list[RecordingCache]:
    return [member for member in _cache_members(cache) if isinstance(member, RecordingCache)]


# --- candidates of the modules ---------------------------------------------------------------


def _candidates(model: Any) -> Iterator[Rotation]:
    """Yield every distinct rotation that a module's attributes could mean, at start 0."""
    seen = set()
    for module in model.modules():
        for rotation in _declared_rotations(module):
            if rotation not in seen:
                seen.add(rotation)
                yield rotation


def _declared_rotations(module: nn.Module) -> Iterator[Rotation]:
    traditional = getattr(module, "traditional", None)
    layouts = (traditional,) if isinstance(traditional, bool) else (False, True)
    base = _positive(module, "base")
    scale = _positive(module, "scale") or 1.0
    dims = int(_positive(module, "dims") or _positive(module, "dim") or 0)
    if base and dims and dims % 2 == 0:
        for layout in layouts:
            yield Rotation(KEYS, 0, dims, layout, base, scale, None)
    for name, value in module.items():
        if isinstance(value, mx.array) and "freq" in name and value.ndim == 1:
            # mlx-lm keeps tokens per radian, infinite where a pair stands still.
            periods = [float(period) for period in value.astype(mx.float32).tolist()]
            if periods and all(abs(period) > 0 for period in periods):
                turns = tuple(1 / period for period in periods)
                for layout in layouts:
                    yield Rotation(KEYS, 0, 2 * len(turns), layout, None, 1.0, turns)


def _positive(module: nn.Module, name: str) -> float | None:
    value: Any = getattr(module, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) and value > 0 else None


# --- the comparison --------------------------------------------------------------------------


def _explain_all(runs: dict[int, Caches], candidates: list[Rotation]) -> Iterator[CacheRotations]:
    for index in range(len(runs[0])):
        caches = {position: caches[index] for position, caches in runs.items()}
        yield from _explain_cache(caches, candidates)


def _explain_cache(caches: dict[int, Any], candidates: list[Rotation]) -> Iterator[CacheRotations]:
    """Explain each plain cache that a model's cache is made of."""
    for number in range(len(_cache_members(caches[0]))):
        members = {position: _cache_members(cache)[number] for position, cache in caches.items()}
        yield _explain_member(members, number, candidates)


def _explain_member(
    members: dict[int, Any], number: int, candidates: list[Rotation]
) -> CacheRotations:
    member = members[0]
    if isinstance(member, ArraysCache):
        return ()
    if not isinstance(member, RecordingCache):
        return UnknownRotation(f"a cache of class {type(member).__name__} cannot be observed")
    if member.writes_count > 1:
        return UnknownRotation("a step writes the cache more than once")
    rotations = []
    for store in _stores(members, number):
        rotation = _explain(store, candidates)
        if isinstance(rotation, UnknownRotation):
            return rotation
        if rotation is not None:
            rotations.append(rotation)
    return tuple(rotations)


def _stores(members: dict[int, RecordingCache], number: int) -> Iterator[_Store]:
    member = members[0]
    if not member.writes_count:
        return  # the layer reads another layer's cache
    assert member.values is not None, "keys and values are written together"
    # An indexer stores keys, and no values.
    is_index = number > 0 and not mx.any(member.values).item()
    slots = (INDEX, None) if is_index else (KEYS, VALUES)
    for name, slot in zip((KEYS, VALUES), slots, strict=True):
        rows = {position: getattr(recorded, name) for position, recorded in members.items()}
        if rows[0].size:
            yield _Store(slot, f"{name} of cache {number}" if number else name, rows)


def _explain(store: _Store, candidates: list[Rotation]) -> Rotation | UnknownRotation | None:
    """Return the rotation that explains all positions, or None if all are equal."""
    if store.label == KEYS and not mx.abs(store.rows[0]).max().item():
        return UnknownRotation("the keys are all zero")
    if rotation_fits(None, store.rows):
        return None
    if store.slot is None:
        return UnknownRotation(f"{store.label}: depend on the position and have no slot")
    placed = _place(store.slot, store.rows[0].shape[-1], candidates)
    near = {position: rows for position, rows in store.rows.items() if position < _FAR_POSITION}
    fit_near = [rotation for rotation in placed if rotation_fits(rotation, near)]
    for rotation in fit_near:
        if rotation_fits(rotation, store.rows):
            return rotation
    if fit_near:
        return UnknownRotation(f"{store.label}: turn at another rate far from the start")
    why = f"{store.label}: change with the position, and no rotation of the model explains how"
    return UnknownRotation(why)


def _place(slot: str, width: int, candidates: list[Rotation]) -> Iterator[Rotation]:
    """Yield each candidate at the head and at the tail of a row of `width`."""
    for candidate in candidates:
        if candidate.dims <= width:
            for start in dict.fromkeys((0, width - candidate.dims)):
                yield replace(candidate, slot=slot, start=start)


def rotation_fits(rotation: Rotation | None, rows: dict[int, mx.array]) -> bool:
    """Return whether rotating the rows of position 0 gives those of every position.

    `rows` are `[rows, heads, 1, width]` by position. None stands for rows that do not change.
    """
    before = rows[0]
    size = _pair_sizes(rotation, before.astype(mx.float32))
    for position, after in rows.items():
        if position == 0:
            continue
        expected = before if rotation is None else rotate(before, rotation, position)
        off = mx.abs(expected.astype(mx.float32) - after.astype(mx.float32)).max(axis=(0, 1, 2))
        # A dimension that is nearly zero everywhere is held to a thousandth of the largest.
        allowed = (size + size.max() / 1_000) * _tolerance(rotation, before.dtype, position)
        if not mx.all(off <= allowed).item():  # also true for NaN
            return False
    return True


def _tolerance(rotation: Rotation | None, dtype: mx.Dtype, position: int) -> float:
    """Relative error that rounding may make: of the dtype, and of a float32 angle."""
    angle = 0.0 if rotation is None else position * mx.finfo(mx.float32).eps
    return float(4 * mx.finfo(dtype).eps + angle)


def _pair_sizes(rotation: Rotation | None, rows: mx.array) -> mx.array:
    """Largest length of the pair each dimension turns in `[width]`, or of itself alone."""
    partner = list(range(rows.shape[-1]))
    for a, b in rotation.pairs if rotation is not None else ():
        partner[a], partner[b] = b, a
    return mx.sqrt(rows**2 + rows[..., mx.array(partner)] ** 2).max(axis=(0, 1, 2))
