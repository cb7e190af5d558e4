"""Models whose next token depends on every byte of the cache that they are given.

A token's entry is a hash of the token and of all that is seen before it; its entry in a window and
the state are hashes of that entry. The next token is a hash of all entries, of those in the window,
and of the state. So a block that is missing, swapped, or of another conversation changes the text,
whichever group of layers it belongs to. The hash also covers how far rows were moved.
"""

from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from fabric.ids import Fingerprint
from fabric.kvcache.arrangement import UNEDITED_GRID, Arrangement, cut_shifts, unshiftable_reason
from fabric.kvcache.cache_spec import (
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    SlotSpec,
    TensorSpec,
)
from node.limits import STATES_HOT_MAX
from tests.sim.rows import ENTRY_BYTES, STATE_BYTES, Growth, Rows, grown
from tests.sim.window import WINDOW_ENTRY_BYTES, WINDOW_TOKENS, SimWindow

_FULL = LayerSpec(LayerKind.FULL, (SlotSpec("keys", 1, ENTRY_BYTES, 0, 1, "U8"),))
_WINDOW = LayerSpec(
    LayerKind.WINDOW,
    (SlotSpec("keys", 1, WINDOW_ENTRY_BYTES, 0, 1, "U8"),),
    window_tokens=WINDOW_TOKENS,
)
_STATE = LayerSpec(LayerKind.RECURRENT, states=(TensorSpec("state.0", "U8", (1, STATE_BYTES)),))


@dataclass(frozen=True)
class Kind:
    """A model: what its layers keep, and the fingerprint that its blocks are named by."""

    name: str
    spec: ModelCacheSpec

    @property
    def fingerprint(self):
        return Fingerprint(self.name[:1].encode() * 32)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("full", ModelCacheSpec((_FULL,))),
        Kind("window", ModelCacheSpec((_FULL, _WINDOW))),
        Kind("recurrent", ModelCacheSpec((_FULL, _STATE))),
        Kind("all", ModelCacheSpec((_FULL, _WINDOW, _STATE))),
    )
}
FULL = KINDS["full"]
MODEL = "simulated"
CONTEXT_TOKENS_MAX = 8_192
GROWTH_TOKENS = 64
END = 4  # the character that ends a message
_LETTERS = "abcdefghijklmnopqrstuvwxyz      "
_END_ODDS = 24
_MARKER_END, _MARKER_CHARS_MAX = ord(">"), 8


class SimCache:
    """The interface of ResidentCache, for up to three layers of a few bytes each."""

    def __init__(self, capacity_tokens, kind=FULL):
        self.kind = kind
        self.spec = kind.spec
        self.owner = None  # the agent that computes with it
        self.borrowed_origins = frozenset()  # agents whose rows it has after an edit
        self._words, self._read_tokens = frozenset(), 0  # the markers in that many tokens
        self.tokens_count = 0
        self.ahead = self.shifts = ()
        self.keeps_slid = False
        self.slid = {}
        self.snapshots = {}
        self.states = {}
        self.windows = SimWindow(self.spec.window_tokens)
        self._has_state = CacheGroup.STATE in self.spec.groups
        self.state = np.zeros(STATE_BYTES if self._has_state else 0, np.uint8)
        self._entries = np.zeros(0, np.uint8)
        Growth.count += 1
        self.reserve(capacity_tokens)

    # --- how much ----------------------------------------------------------------------------

    @property
    def recurrent(self):
        return (self,) if self._has_state else ()  # no cycle, so that a dropped cache is freed

    @property
    def size_bytes(self):
        passing = sum(view.nbytes for view in self.slid.values())
        passing += sum(len(state) for state in self.snapshots.values())
        return self.resident_bytes + passing

    @property
    def resident_bytes(self):
        """Size without the parts that only wait to be saved."""
        return len(self._entries) + self.windows.size_bytes + len(self.state)

    def reserve(self, tokens_count):
        size_bytes = -(-tokens_count // GROWTH_TOKENS) * GROWTH_TOKENS * ENTRY_BYTES
        self._entries = grown(self._entries, size_bytes)

    def give_back_room(self, tokens_count):
        size_bytes = -(-tokens_count // GROWTH_TOKENS) * GROWTH_TOKENS * ENTRY_BYTES
        if len(self._entries) > 2 * size_bytes:
            self._entries = self._entries[:size_bytes].copy()

    @property
    def ahead_tokens(self):
        return sum(end - start for start, end in self.ahead)

    @property
    def held(self):
        return self._entries[: self.tokens_count * ENTRY_BYTES]

    @property
    def window_base(self):
        return self.windows.base

    # --- steps -------------------------------------------------------------------------------

    def append(self, token):
        entry = xxh3_64_digest(self._seen(), token)
        self.reserve(self.tokens_count + 1)
        at = self.tokens_count * ENTRY_BYTES
        self._entries[at : at + ENTRY_BYTES] = np.frombuffer(entry, np.uint8)
        if self.owner is not None:
            Rows.note(entry, token, self.tokens_count, self.owner)
            self._trace(entry, token)
        self.windows.append(entry, self.tokens_count)
        if self._has_state:
            old = self.state.tobytes()
            self.state = np.frombuffer(
                xxh3_64_digest(old + entry, 2) + xxh3_64_digest(old + entry, 3), np.uint8
            )
            if self.owner is not None:
                Rows.note_settings(self.state.tobytes(), self._words)
        self.tokens_count += 1
        if self.ahead and self.tokens_count == self.ahead[0][0]:
            self._slide_ahead(self.ahead[0][1])
            self.tokens_count, self.ahead = self.ahead[0][1], self.ahead[1:]

    def _trace(self, entry, token):
        """Record the inputs of an entry that is about to be appended."""
        count = self.tokens_count
        if self._read_tokens != count:  # rows were restored, moved or rewound
            entries = (self._entry(at) for at in range(count))
            self._words = frozenset().union(*(Rows.words.get(each, ()) for each in entries))
        if token == _MARKER_END:
            before = [self._entry(at) for at in range(max(0, count - _MARKER_CHARS_MAX), count)]
            word = Rows.word_at([*before, entry])
            self._words |= {word} if word is not None else set()
        self._read_tokens = count + 1
        Rows.trace(entry, self._words, self.borrowed_origins, self.owner)

    def _entry(self, at):
        return self._entries[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES].tobytes()

    def _seen(self):
        """Return all bytes that the next token depends on."""
        if not (self.shifts or self.windows.tokens or self._has_state):
            return self.held
        moved = cut_shifts(self.shifts, 0, self.tokens_count)
        moves_text = b"".join(bytes(str(shift), "ascii") for shift in moved)
        window = self.windows.seen(self.tokens_count)
        return self.held.tobytes() + moves_text + window + self.state.tobytes()

    def next_token(self, sampling, seed, index):
        """Return the next token: from the cache alone if greedy, else also from seed and index."""
        salt = (seed + index) & (2**64 - 1) if sampling.temperature else 0
        sampled = xxh3_64_intdigest(self._seen(), salt)
        if sampled % _END_ODDS == 0 and not sampling.ignore_eos:
            return END
        return ord(_LETTERS[sampled // _END_ODDS % len(_LETTERS)])

    def logprob(self):
        return -(xxh3_64_intdigest(self._seen()) % 1_000) / 100

    # --- windows -----------------------------------------------------------------------------

    def slide(self):
        keep = self.windows.needed_from(self.tokens_count)
        if keep > self.window_base:
            self._hold_windows(keep)

    def rest(self):
        self.windows.beside = []
        if self.windows.tokens:
            self._hold_windows(max(self.windows.needed_from(self.tokens_count), self.window_base))

    def _hold_windows(self, base):
        self._copy_out(base)
        self.windows.keep_from(base)

    def _copy_out(self, until):
        for start, end in self.windows.due(until):
            if self.keeps_slid:
                self.slid[start] = self.gather(start, end, CacheGroup.WINDOW)

    def _slide_ahead(self, end):
        if self.windows.tokens:
            keep = self.windows.needed_from(end)
            self._copy_out(min(keep, self.tokens_count))
            self.windows.append_held_rows(keep, self.tokens_count)

    def place_windows(self, tokens_count):
        self.windows.beside, self.windows.base = [], self.windows.needed_from(tokens_count)
        return self.window_base

    # --- rewinding ---------------------------------------------------------------------------

    def can_rewind(self, tokens_count):
        if tokens_count == self.tokens_count:
            return True
        if tokens_count > self.tokens_count:
            return False
        if self._has_state and tokens_count and tokens_count not in self.states:
            return False
        return self.windows.needed_from(tokens_count) >= self.window_base

    def rewind_point(self, limit):
        points = (limit, self.tokens_count, *self.states)
        return max((p for p in points if p <= limit and self.can_rewind(p)), default=0)

    def rewind(self, tokens_count, grid=UNEDITED_GRID):
        assert self.can_rewind(tokens_count), "only what is held can be kept"
        if tokens_count != self.tokens_count:
            self.slid.clear()
            self.snapshots.clear()
            self.clear_states()
            self.states = {end: kept for end, kept in self.states.items() if end <= tokens_count}
            self.state = self.states.get(tokens_count, self.state)
        window = self.windows
        window.grid, window.beside = grid, []
        window.copied_out = min(window.copied_out, grid.block_start(tokens_count))
        self.ahead, self.shifts = (), cut_shifts(self.shifts, 0, tokens_count)
        self.tokens_count, self._read_tokens = tokens_count, -1

    def assume(self, tokens_count):
        self.hold(tokens_count, (), ())

    def hold(self, tokens_count, ahead, shifts, grid=UNEDITED_GRID):
        assert not ((ahead or shifts) and unshiftable_reason(self.spec)), "rows stay in place"
        self._arrange(Arrangement.of([(0, tokens_count), *ahead], shifts))
        self.windows.grid, self.windows.copied_out = grid, grid.block_start(tokens_count)
        self._keep_state()

    def can_rearrange(self, moves, grid):
        after = Arrangement(self.tokens_count, self.ahead, self.shifts).after(moves)
        return self.windows.can_move(after, moves, grid, self.tokens_count)

    def rearrange(self, moves, grid=UNEDITED_GRID):
        """Move entries as bytes, without recomputing them."""
        assert not unshiftable_reason(self.spec), "rows stay in place"
        after = Arrangement(self.tokens_count, self.ahead, self.shifts).after(moves)
        rows = self._entries.reshape(-1, ENTRY_BYTES)
        taken = [(move, rows[move.start : move.end].copy()) for move in moves]
        windows = self.windows.moved(after, moves, grid)
        head = moves[0].end
        self.rewind(head if self.can_rewind(head) else self.place_windows(0))
        self.reserve(after.end)
        for move, entries in taken:
            self._entries.reshape(-1, ENTRY_BYTES)[move.new_start : move.new_end] = entries
        self.windows.take(windows, grid)
        self._arrange(after)

    def _arrange(self, to):
        assert to.end * ENTRY_BYTES <= len(self._entries), "more than capacity"
        self.tokens_count, self.ahead, self.shifts = to.tokens_count, to.ahead, to.shifts
        self._read_tokens, self.borrowed_origins = -1, frozenset()

    # --- bytes in and out --------------------------------------------------------------------

    def rows(self, group=CacheGroup.FULL):
        if group is CacheGroup.WINDOW:
            return [self.windows.rows[None]]
        return [self._entries.reshape(1, -1, ENTRY_BYTES)]

    def places(self, start, end, group=CacheGroup.FULL):
        base = 0
        if group is CacheGroup.WINDOW:
            base = self.window_base
            self.windows.grow(end)
        return [row[:, start - base : end - base] for row in self.rows(group)]

    def gather(self, start, end, group=CacheGroup.FULL):
        base = self.window_base if group is CacheGroup.WINDOW else 0
        assert base <= start < end <= self.tokens_count, "gather only what is held"
        (row,) = self.rows(group)
        return memoryview(row[0, start - base : end - base].tobytes())

    def take_snapshot(self):
        if self._has_state:
            self.snapshots[self.tokens_count] = self.state
            self._keep_state()

    def mark(self):
        return SimMark(self.tokens_count, self.state)

    def take_marked(self, mark):
        if self._has_state:
            self.snapshots[mark.tokens_count] = self.states[mark.tokens_count] = mark.state
            self.states = dict(sorted(self.states.items())[-STATES_HOT_MAX:])

    def _keep_state(self):
        if self._has_state:
            self.states[self.tokens_count] = self.state
            self.states = dict(sorted(self.states.items())[-STATES_HOT_MAX:])

    def gather_snapshot(self, tokens_count):
        return memoryview(self.snapshots[tokens_count].tobytes())

    def state_views(self):
        if not self._has_state:
            return []
        self.state = np.zeros(STATE_BYTES, np.uint8)
        return [memoryview(self.state)]

    def clear_states(self):
        self.state = np.zeros(len(self.state), np.uint8)

    def settle(self):
        pass

    def copy(self, capacity_tokens):
        """Return a cache of the same tokens."""
        made = SimCache(capacity_tokens, self.kind)
        made._entries[: len(self.held)] = self.held
        made.windows = self.windows.copy()
        made.state, made.tokens_count = self.state, self.tokens_count
        made.shifts = cut_shifts(self.shifts, 0, self.tokens_count)
        return made

    def parts(self):
        """Return the contents for comparison: entries, window from its base on, state."""
        window = self.windows.rows[: self.tokens_count - self.window_base]
        return self.held.tobytes(), self.window_base, window.tobytes(), self.state.tobytes()


@dataclass(frozen=True)
class SimMark:
    """The token count and state of a cache before a step."""

    tokens_count: int
    state: np.ndarray
