"""All layers of one sequence, with access to their exact bytes without a staging copy.

The bytes of tokens `a:b` in a layer's array are one run per head, `[kv_heads, b-a, row]`.
Blocks have the same order, so a block is read directly into its final position.
Views must be released before the next step: a live one would force MLX to copy.

    full layers     0 .................................................. tokens_count
    window layers                      base ............................ tokens_count
    recurrent layers                                                     tokens_count

An edit leaves rows after a hole, which must be computed before they are valid (`ahead`), and rows
at other positions than they were computed for (`shifts`). Their bytes stay unchanged: attention
rotates them when it reads.

    full layers     0 ...... tokens_count [ hole )[ ahead ............... )[ hole )[ ahead )

Window layers hold whole blocks from `base` on; after a hole they continue with rows that are held
separately (`WindowRows`). A block is copied out before it slides away (`slid`), recurrent states on
the caller's request (`snapshots`), for saving the agent. The newest states also stay in memory
(`states`), for rewinding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from fabric.kvcache.arrangement import (
    UNEDITED_GRID,
    Arrangement,
    Move,
    Range,
    Shift,
    WindowGrid,
    cut_shifts,
    unshiftable_reason,
)
from fabric.kvcache.cache_spec import CacheGroup, LayerKind, LayerSpec, ModelCacheSpec
from fabric.limits import BLOCK_TOKENS
from node.limits import STATES_HOT_MAX
from node.mlx.recurrent_layer import Mark, RecurrentLayer, Snapshot
from node.mlx.resident_layer import ResidentLayer, rows_of
from node.mlx.sliding_windows import SlidingWindows
from node.mlx.token_store import DTYPES, GROWTH_TOKENS
from node.mlx.window_layer import ChunkLayer, WindowLayer
from node.store.staging import Place

LayerCache = ResidentLayer | RecurrentLayer


def make_layer_cache(layer: LayerSpec, capacity_tokens: int, *, packed: bool) -> LayerCache:
    """Return an empty cache of one layer."""
    if layer.kind is LayerKind.RECURRENT:
        return RecurrentLayer(zero_states(layer))
    if layer.kind is LayerKind.WINDOW:
        kind = ChunkLayer if layer.is_chunked else WindowLayer
        return kind(layer, capacity_tokens, packed=packed)
    is_packed = packed and layer.kind is LayerKind.FULL
    return ResidentLayer(layer, capacity_tokens, packed=is_packed)


def zero_states(layer: LayerSpec) -> Snapshot:
    """Return a recurrent layer's states of an empty context."""
    return [mx.zeros(state.shape, DTYPES[state.dtype]) for state in layer.states]


def arrange_layers(spec: ModelCacheSpec, leaves: list[Any]) -> list[Any]:
    """Arrange one object per layer as the model does: some caches are lists of several."""
    at, out = 0, []
    for count in spec.nesting:
        out.append(leaves[at] if count == 0 else leaves[at : at + count])
        at += max(count, 1)
    assert at == len(leaves), "the nesting covers every layer"
    return out


@dataclass(frozen=True, slots=True)
class CacheMark:
    """State of a cache to which a failed step is undone."""

    tokens_count: int
    states: tuple[Mark, ...]
    ahead: tuple[Range, ...] = ()


class ResidentCache:
    """A sequence's cache in memory; only the engine thread computes with it."""

    array_bytes_min = 0  # counted for each of its arrays, where their number is limited

    def __init__(self, spec: ModelCacheSpec, capacity_tokens: int, *, packed: bool = True) -> None:
        self.spec = spec
        self.tokens_count = 0
        self.ahead: tuple[Range, ...] = ()  # rows held after holes
        self.shifts: tuple[Shift, ...] = ()
        room = min(capacity_tokens, spec.window_tokens + 2 * BLOCK_TOKENS)
        self.leaves = [
            make_layer_cache(layer, room if layer.window_tokens else capacity_tokens, packed=packed)
            for layer in spec.layers
        ]
        self.layers = arrange_layers(spec, self.leaves)
        self.recurrent = [leaf for leaf in self.leaves if isinstance(leaf, RecurrentLayer)]
        self._resident = [leaf for leaf in self.leaves if isinstance(leaf, ResidentLayer)]
        self._growing = [leaf for leaf in self._resident if not isinstance(leaf, WindowLayer)]
        self.snapshots: dict[int, list[Snapshot]] = {}
        self.states: dict[int, list[Snapshot]] = {}
        self.slid: dict[int, memoryview] = {}
        self.keeps_slid = False
        # Layers whose cache the model never writes.
        self._idle = [leaf for leaf in self._resident if not leaf.spec.slots]
        self.windows = SlidingWindows(self.leaves, spec.window_tokens)
        self._has_index = any(layer.kind is LayerKind.INDEXED for layer in spec.layers)
        self.settle()

    # --- size --------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of memory, capacity included; callable from any thread."""
        total_bytes = sum(leaf.nbytes for leaf in self.leaves)
        total_bytes += sum(view.nbytes for view in list(self.slid.values()))
        total_bytes += self.windows.size_bytes
        # Count a state once, even if it is held several times or is the current one.
        snapshots = [*self.snapshots.values(), *self.states.values()]
        arrays = {id(array): array for states in snapshots for state in states for array in state}
        for layer in self.recurrent:
            for array in layer.cache:
                arrays.pop(id(array), None)
        total_bytes += sum(int(array.nbytes) for array in arrays.values())
        arrays_count = len(arrays) + sum(len(leaf.state) for leaf in self._resident)
        return max(total_bytes, self.array_bytes_min * arrays_count)

    @property
    def ahead_tokens(self) -> int:
        """Number of tokens after holes."""
        return sum(end - start for start, end in self.ahead)

    @property
    def held_until(self) -> int:
        """Position after the last held row."""
        return self.ahead[-1][1] if self.ahead else self.tokens_count

    @property
    def window_base(self) -> int:
        """First token that window layers hold."""
        return self.windows.base

    def reserve(self, tokens_count: int) -> None:
        """Grow arrays to hold `tokens_count` tokens in total; window layers slide instead."""
        for leaf in self._growing:
            leaf.reserve(tokens_count)

    def give_back_room(self, tokens_count: int) -> None:
        """Shrink arrays to `tokens_count` tokens, if that frees most of their memory.

        Useful after a long context was cut to its head and a short one continues from it.
        """
        tokens_count = max(tokens_count, self.held_until)
        for leaf in self._growing:
            leaf.give_back_room(tokens_count)

    # --- steps -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Evaluate all arrays, so that their memory may be read or written directly."""
        mx.eval([leaf.state for leaf in self.leaves])

    def step_outputs(self) -> list[Any]:
        """Return arrays that a step changes and that its logits may not depend on, to evaluate."""
        if self._has_index:
            return [leaf.state for leaf in self._resident]
        return [array for layer in self.recurrent for array in layer.mark().arrays]

    def advance(self, count: int) -> None:
        """Count appended tokens; if they fill a hole, make the rows after it valid."""
        self.tokens_count += count
        if self.ahead and self.tokens_count == self.ahead[0][0]:
            self._slide_ahead(self.ahead[0][1])
            self._set_count(self.ahead[0][1])
            self.ahead = self.ahead[1:]
        for leaf in self._idle:
            leaf.offset = self.tokens_count

    def _slide_ahead(self, end: int) -> None:
        """Move window layers to the end of the rows ahead, after copying out blocks they drop."""
        if self.windows.leaves:
            keep = self.windows.needed_from(end)
            self.settle()
            self._copy_out(min(keep, self.tokens_count))
            self.windows.append_held_rows(keep)

    def mark(self) -> CacheMark:
        states = tuple(layer.mark() for layer in self.recurrent)
        return CacheMark(self.tokens_count, states, self.ahead)

    def undo(self, mark: CacheMark) -> None:
        """Undo a failed step, at any stage."""
        assert mark.ahead == self.ahead or not self.windows.leaves, "windows do not slide back"
        self.ahead = mark.ahead
        self._set_count(mark.tokens_count)
        for layer, state in zip(self.recurrent, mark.states, strict=True):
            layer.undo(state)

    def leave_batch(self) -> None:
        """Copy recurrent states out of the batch's stacked arrays."""
        for layer in self.recurrent:
            layer.leave_batch()

    def slide(self) -> None:
        """Drop window rows that no later token attends to, after copying them out."""
        keep = self.windows.needed_from(self.tokens_count)
        if keep > self.window_base:
            self._hold_windows(keep, GROWTH_TOKENS)

    def make_room(self) -> None:
        """Slide before a decode step that would make window layers grow."""
        for layer in self.windows.leaves[:1]:
            if self.tokens_count + 1 > layer.base + layer.capacity_tokens:
                self.slide()

    def rest(self) -> None:
        """Free memory that an idle agent does not need."""
        self.leave_batch()
        self.windows.beside = ()
        if self.windows.leaves:
            keep = max(self.windows.needed_from(self.tokens_count), self.window_base)
            self._hold_windows(keep, 0)

    def _copy_out(self, until: int) -> None:
        for start, end in self.windows.due(until):
            if self.keeps_slid:
                self.slid[start] = self.gather(start, end, CacheGroup.WINDOW)

    def _hold_windows(self, base: int, room_tokens: int) -> None:
        """Keep window rows from `base` on, with room for more, after copying out the others."""
        self.settle()
        self._copy_out(base)
        self.windows.keep_from(base, self.tokens_count - base + room_tokens)
        self.settle()

    # --- rewinding ---------------------------------------------------------------------------

    def can_rewind(self, tokens_count: int) -> bool:
        """Return whether the first `tokens_count` tokens can be kept without reading from disk."""
        if tokens_count == self.tokens_count:
            return True
        if tokens_count > self.tokens_count:
            return False
        if self.recurrent and tokens_count and tokens_count not in self.states:
            return False
        return self.windows.needed_from(tokens_count) >= self.window_base

    def rewind_point(self, limit: int) -> int:
        """Return the largest token count up to `limit` to which the cache can rewind, or 0."""
        points = (limit, self.tokens_count, *self.states)
        return max((p for p in points if p <= limit and self.can_rewind(p)), default=0)

    def rewind(self, tokens_count: int, grid: WindowGrid = UNEDITED_GRID) -> None:
        """Keep only the first `tokens_count` tokens; `grid` describes their blocks."""
        assert self.can_rewind(tokens_count), "only held tokens can be kept"
        if tokens_count != self.tokens_count:
            self.slid.clear()
            self.snapshots.clear()
            self._go_back_to_state(tokens_count)
        self.windows.cut(tokens_count, grid)
        self.ahead = ()
        self._set_shifts(cut_shifts(self.shifts, 0, tokens_count))
        self._set_count(tokens_count)

    def _go_back_to_state(self, tokens_count: int) -> None:
        self.states = {end: taken for end, taken in self.states.items() if end <= tokens_count}
        if not tokens_count:
            self.clear_states()
        for layer, state in zip(self.recurrent, self.states.get(tokens_count, ()), strict=False):
            layer.replace(list(state))

    def place_windows(self, tokens_count: int) -> int:
        """Prepare an empty cache for window blocks as of `tokens_count`; return their start."""
        base = self.windows.needed_from(tokens_count)
        self.windows.place(base)
        return base

    def assume(self, tokens_count: int) -> None:
        """Declare the first `tokens_count` tokens valid after their bytes were loaded."""
        self.hold(tokens_count, (), ())

    def hold(
        self,
        tokens_count: int,
        ahead: Sequence[Range],
        shifts: Sequence[Shift],
        grid: WindowGrid = UNEDITED_GRID,
    ) -> None:
        """Declare the first tokens valid, and rows `ahead` of holes loaded."""
        assert not ((ahead or shifts) and unshiftable_reason(self.spec)), "rows stay in place"
        self._arrange(Arrangement.of([(0, tokens_count), *ahead], shifts))
        self.windows.hold(tokens_count, grid)
        self._keep_state()

    def can_rearrange(self, moves: Sequence[Move], grid: WindowGrid) -> bool:
        """Return whether window layers hold all rows that they need after the moves."""
        return self.windows.can_move(self._after(moves), moves, grid, self.tokens_count)

    def rearrange(self, moves: Sequence[Move], grid: WindowGrid = UNEDITED_GRID) -> None:
        """Move tokens to their new positions, with unchanged bytes; the first move keeps the head.

        Rows after a hole become `ahead`. After a failure only the head is left, or nothing if
        windows have slid past it. `grid` describes the blocks of the result.
        """
        assert not unshiftable_reason(self.spec), "rows stay in place"
        assert moves[0].start == moves[0].new_start == 0, "the head stays where it is"
        assert self.can_rearrange(moves, grid), "windows have slid on"
        after = self._after(moves)
        rows = self.windows.moved(after, moves, grid)
        head = moves[0].end
        if not self.can_rewind(head):
            head = self.place_windows(0)
        self.rewind(head)
        if any(move.start != move.new_start for move in moves):
            for leaf in self._growing:
                leaf.rearrange(moves)
        self.windows.take(rows, grid)
        self._arrange(after)

    def _after(self, moves: Sequence[Move]) -> Arrangement:
        return Arrangement(self.tokens_count, self.ahead, self.shifts).after(moves)

    def _arrange(self, to: Arrangement) -> None:
        for leaf in self._resident:
            end = to.tokens_count if isinstance(leaf, WindowLayer) else to.end
            assert end <= leaf.base + leaf.capacity_tokens, "more than capacity"
        waiting = len(to.ahead) if self.windows.leaves else 0
        assert len(self.windows.beside) == waiting, "each hole has windows after it"
        self.ahead = to.ahead
        self._set_shifts(to.shifts)
        self._set_count(to.tokens_count)

    def fill(self, tokens_count: int, key: mx.array) -> None:
        """Fill an empty cache with random vectors, for trials, up to token `tokens_count`."""
        for leaf in self._resident:
            key, own = mx.random.split(key)
            leaf.fill(tokens_count, own)
        self.settle()

    def _set_count(self, tokens_count: int) -> None:
        self.tokens_count = tokens_count
        for leaf in self._resident:
            leaf.offset = tokens_count

    def _set_shifts(self, shifts: tuple[Shift, ...]) -> None:
        if shifts == self.shifts:
            return
        self.shifts = shifts
        for leaf in self._resident:
            leaf.shifts = shifts

    # --- bytes in and out --------------------------------------------------------------------

    def rows(self, group: CacheGroup = CacheGroup.FULL) -> list[Place]:
        """Return writable views of a group's arrays `[kv_heads, capacity, bytes]` in file order."""
        return rows_of(leaf for leaf in self._resident if leaf.spec.group is group)

    def _base(self, group: CacheGroup) -> int:
        return self.window_base if group is CacheGroup.WINDOW else 0

    def places(self, start: int, end: int, group: CacheGroup = CacheGroup.FULL) -> list[Place]:
        """Return writable views `[kv_heads, end-start, bytes]` of tokens in block-file order."""
        base = self._base(group)
        return [rows[:, start - base : end - base] for rows in self.rows(group)]

    def gather(self, start: int, end: int, group: CacheGroup = CacheGroup.FULL) -> memoryview:
        """Copy tokens `start:end` into one buffer in block-file order."""
        held_from = self._base(group)
        assert held_from <= start < end <= self.tokens_count, "gather only held tokens"
        out = np.empty(self.spec.kv_bytes(end - start, group), np.uint8)
        at = 0
        for picked in self.places(start, end, group):
            out[at : at + picked.size].reshape(picked.shape)[:] = picked
            at += picked.size
        assert at == len(out), "the spec and the arrays disagree"
        return out.data

    # --- recurrent states --------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Take a snapshot of the current recurrent states."""
        if self.recurrent:
            self.snapshots[self.tokens_count] = snapshot = self._keep_state()
            mx.eval(snapshot)

    def take_marked(self, mark: CacheMark) -> None:
        """Take a snapshot of the recurrent states at a mark."""
        if self.recurrent:
            snapshot = [state.snapshot() for state in mark.states]
            mx.eval(snapshot)
            self.snapshots[mark.tokens_count] = snapshot
            self._hold_state(mark.tokens_count, snapshot)

    def _keep_state(self) -> list[Snapshot]:
        """Add the current states to the newest ones in memory; return them."""
        snapshot = [layer.snapshot() for layer in self.recurrent]
        if snapshot:
            self._hold_state(self.tokens_count, snapshot)
        return snapshot

    def _hold_state(self, tokens_count: int, taken: list[Snapshot]) -> None:
        self.states[tokens_count] = taken
        self.states = dict(sorted(self.states.items())[-STATES_HOT_MAX:])

    def gather_snapshot(self, tokens_count: int) -> memoryview:
        """Copy the snapshot at `tokens_count` into one buffer in file order."""
        arrays = [mx.contiguous(a) for state in self.snapshots[tokens_count] for a in state]
        mx.eval(arrays)
        out = bytearray()
        for array in arrays:
            out += memoryview(array).cast("B")
        assert len(out) == self.spec.kv_bytes(0, CacheGroup.STATE), "states are as specified"
        return memoryview(out)

    def state_views(self) -> list[memoryview]:
        """Return writable views of the states of a cache that has not been used yet."""
        return [memoryview(array).cast("B") for layer in self.recurrent for array in layer.cache]

    def clear_states(self) -> None:
        """Restore the states of an empty context."""
        for leaf, layer in zip(self.leaves, self.spec.layers, strict=True):
            if isinstance(leaf, RecurrentLayer):
                leaf.replace(zero_states(layer))
        mx.eval([layer.cache for layer in self.recurrent])
