"""Caches computed in chunks, stored and restored, and their results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.edited_head import Origin
from fabric.record.layout import Held, Layout
from fabric.record.manifest import Placed
from fabric.record.piece_table import Piece
from fabric.u32s import U32s
from node.mlx.engine import Engine
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import PosixDisk
from node.tiers.restore import load_layout
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, TENANT
from tests.support.tiny_models import VOCABULARY

STEPS = 6
# Where prefill chunks end, so that warm and cold prompts meet the same shapes: before the window
# is full, after it, just into the second block, and the end.
GRID = (20, 40, 260, 300)


def prompt_of(count: int, seed: int = 0) -> list[int]:
    """Return a random prompt."""
    return np.random.default_rng([seed, count]).integers(10, VOCABULARY, count).tolist()


def prefilled(engine: Engine, prompt: list[int]) -> ResidentCache:
    """Prefill chunk by chunk, keeping what slides away and a state at every chunk's end."""
    cache = engine.new_cache(len(prompt) + STEPS)
    cache.keeps_slid = True
    extend(engine, cache, prompt)
    return cache


def extend(engine: Engine, cache: ResidentCache, prompt: list[int]) -> None:
    """Prefill the rest of a prompt."""
    while (at := cache.tokens_count) < len(prompt):
        end = next((stop for stop in GRID if stop > at), len(prompt))
        engine.prefill(cache, prompt[at:end])
        cache.take_snapshot()


def logits_after(engine: Engine, cache: ResidentCache, tokens: list[int]) -> NDArray[np.float32]:
    """Feed tokens one by one; return their logits `[tokens, vocabulary]`."""
    rows = [engine.feed([cache], [mx.array([token], mx.uint32)]) for token in tokens]
    return np.array(mx.concatenate(rows).astype(mx.float32))


@dataclass
class Shelf:
    """A block store on a disk, and the blocks that a test stored in it."""

    store: AgentStore
    blocks: BlockStore

    def save(self, cache: ResidentCache, prompt: list[int], before: Layout | None = None) -> Layout:
        """Store a cache's blocks as a turn does; `before` is the layout it was restored from."""
        salt, parts, states = self.store.salt(TENANT), [], []
        ids = prompt[: cache.tokens_count]
        spans = self.store.spans(TENANT, ids)
        stored = {place.start: place.block for place in before.windows} if before else {}
        for span in spans:
            ref = self.store.save_block(span, ids, cache.gather(span.start, span.end))
            window = None
            if CacheGroup.WINDOW in cache.spec.groups and span.start < cache.window_base and before:
                window = stored[span.start]
            elif CacheGroup.WINDOW in cache.spec.groups:
                kv = cache.slid.get(span.start)
                if kv is None:
                    kv = cache.gather(span.start, span.end, CacheGroup.WINDOW)
                twin = span.in_group(salt, CacheGroup.WINDOW)
                window = self.store.save_block(twin, ids, kv)
            origin = Origin(span.parent, U32s(ids[span.start : span.end]))
            parts.append(Held(Piece(ref, 0, ref.tokens_count), origin, window=window))
        for end in sorted(cache.snapshots):
            span = self.store.state_span(TENANT, ids, spans, end)
            kv = cache.gather_snapshot(end)
            states.append(Placed(self.store.save_block(span, ids, kv), end))
        return Layout(tuple(parts), states=tuple(states))

    def restore(
        self, cache: ResidentCache, prompt: list[int], layout: Layout, limit: int | None = None
    ) -> int:
        """Restore up to `limit` tokens of a layout into a cache; return the number restored."""
        layout = layout.cut(len(prompt) if limit is None else limit)
        return load_layout(self.store, TENANT, prompt, layout, cache).tokens_count


@contextmanager
def shelf_at(folder: Path, engine: Engine) -> Iterator[Shelf]:
    """Open a shelf for an engine's caches in an empty folder."""
    disk = PosixDisk(folder, "none")
    blocks = BlockStore(disk, engine.spec, FINGERPRINT)
    records = ManifestStore(disk, CLUSTER_KEY)
    yield Shelf(AgentStore(blocks, records, CLUSTER_KEY, FINGERPRINT, engine.spec), blocks)
    disk.close()
