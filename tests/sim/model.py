"""A model whose next token depends on every byte of the cache that it is given.

A token's entry is a hash of all entries before it and of the token; the next token is a hash
of all entries. So a block that is missing, swapped, or of another conversation changes the text.
"""

from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from fabric.cache_spec import LayerKind, LayerSpec, ModelCacheSpec, SlotSpec
from fabric.ids import Fingerprint
from fabric.limits import PREFILL_CHUNK_TOKENS_MIN
from node.mlx.engine import Drawn

ENTRY_BYTES = 8
SPEC = ModelCacheSpec((
    LayerSpec(LayerKind.FULL, (SlotSpec("keys", 1, ENTRY_BYTES, 0, 1, "U8"),)),
))  # fmt: skip
FINGERPRINT = Fingerprint(b"s" * 32)
MODEL = "simulated"
CONTEXT_TOKENS_MAX = 8_192
GROWTH_TOKENS = 256
END = 4  # the character that ends a message
_LETTERS = "abcdefghijklmnopqrstuvwxyz      "
_END_ODDS = 24


class SimCache:
    """What ResidentCache offers, for one layer of eight bytes a token."""

    spec = SPEC
    window_base = 0
    recurrent = ()

    def __init__(self, capacity_tokens):
        self.tokens_count = 0
        self.keeps_slid = False
        self.slid = {}
        self.snapshots = {}
        self._entries = np.zeros(0, np.uint8)
        self.reserve(capacity_tokens)

    @property
    def size_bytes(self):
        return len(self._entries)

    def reserve(self, tokens_count):
        capacity_bytes = -(-tokens_count // GROWTH_TOKENS) * GROWTH_TOKENS * ENTRY_BYTES
        if capacity_bytes > len(self._entries):
            grown = np.zeros(capacity_bytes, np.uint8)
            grown[: len(self._entries)] = self._entries
            self._entries = grown

    @property
    def held(self):
        return self._entries[: self.tokens_count * ENTRY_BYTES]

    def append(self, token):
        self.reserve(self.tokens_count + 1)
        entry = xxh3_64_digest(self.held, token)
        at = self.tokens_count * ENTRY_BYTES
        self._entries[at : at + ENTRY_BYTES] = np.frombuffer(entry, np.uint8)
        self.tokens_count += 1

    def next_token(self, sampling, seed, index):
        return next_token(self.held, sampling, seed, index)

    def can_rewind(self, tokens_count):
        return tokens_count <= self.tokens_count

    def rewind(self, tokens_count):
        assert self.can_rewind(tokens_count), "only what is held can be kept"
        self.tokens_count = tokens_count

    def assume(self, tokens_count):
        assert tokens_count * ENTRY_BYTES <= len(self._entries), "more than capacity"
        self.tokens_count = tokens_count

    def rows(self, group=None):
        return [self._entries.reshape(1, -1, ENTRY_BYTES)]

    def gather(self, start, end, group=None):
        assert start < end <= self.tokens_count, "gather only what is held"
        return memoryview(self._entries[start * ENTRY_BYTES : end * ENTRY_BYTES].tobytes())

    def state_views(self):
        return []

    def place_windows(self, tokens_count):
        return 0

    def settle(self):
        pass

    def rest(self):
        pass

    def take_snapshot(self):
        pass

    def clear_states(self):
        pass


def next_token(entries, sampling, seed, index):
    """Draw the next token: greedily by the cache alone, else by seed and number, too."""
    drawn = xxh3_64_intdigest(entries, (seed + index) & (2**64 - 1) if sampling.temperature else 0)
    if drawn % _END_ODDS == 0 and not sampling.ignore_eos:
        return END
    return ord(_LETTERS[drawn // _END_ODDS % len(_LETTERS)])


@dataclass(eq=False)
class SimSlot:
    """One decoding sequence, one step ahead of what has been read."""

    cache: SimCache
    sampling: object
    seed: int
    pending: int
    pending_is_drawn: bool = False
    drawn_count: int = 0
    unread: list = field(default_factory=list)

    def take_up(self, drawn_count):
        self.pending_is_drawn = True
        self.drawn_count = drawn_count


class SimEngine:
    """Computes at once and says in `spent_s` how long it would have taken."""

    def __init__(self, tokens_per_s, step_s):
        self.launch_waits = False
        self.chunk_tokens_max = PREFILL_CHUNK_TOKENS_MIN
        self.spent_s = 0.0
        self._tokens_per_s = tokens_per_s
        self._step_s = step_s

    def new_cache(self, capacity_tokens):
        return SimCache(capacity_tokens)

    def prefill(self, cache, tokens):
        self.spent_s += len(tokens) / self._tokens_per_s
        for token in tokens:
            cache.append(token)

    def start(self, cache, prompt, sampling, seed):
        assert cache.tokens_count == len(prompt) - 1, "all but the last token are prefilled"
        return SimSlot(cache, sampling, seed, prompt[-1])

    def launch(self, slots):
        self.spent_s += self._step_s
        for slot in slots:
            slot.cache.append(slot.pending)
            if slot.pending_is_drawn:
                slot.unread.append(slot.pending)
            slot.pending = slot.cache.next_token(slot.sampling, slot.seed, slot.drawn_count)
            slot.drawn_count += 1
            slot.pending_is_drawn = True

    def peek(self, slot):
        return _drawn(slot, slot.pending) if slot.pending_is_drawn else None

    def read(self, slot):
        unread, slot.unread = slot.unread, []
        return [_drawn(slot, token) for token in unread]


def _drawn(slot, token):
    if slot.sampling.logprobs is None:
        return Drawn(token)
    digest = xxh3_64_intdigest(slot.cache.held)
    return Drawn(token, ((token, -(digest % 1_000) / 100),))
