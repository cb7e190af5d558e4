"""Caches computed in chunks, stored and restored, and their results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from fabric.kvcache.cache_spec import CacheGroup
from node.mlx.engine import Engine
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.available_blocks import AvailableBlocks
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import PosixDisk
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
    """A block store on a disk, and what a test put there."""

    store: AgentStore
    blocks: BlockStore

    def save(
        self, cache: ResidentCache, prompt: list[int], before: AvailableBlocks | None = None
    ) -> AvailableBlocks:
        """Store all of a cache's blocks, as a turn would; `before` has what it was read from."""
        salt, available = self.store.salt(TENANT), AvailableBlocks()
        ids = prompt[: cache.tokens_count]
        spans = self.store.spans(TENANT, ids)
        for span in spans:
            kv = cache.gather(span.start, span.end)
            ref = self.store.save_block(span, ids, kv)
            available.full = available.full.append([ref])
            window = span.in_group(salt, CacheGroup.WINDOW)
            if CacheGroup.WINDOW in cache.spec.groups:
                kv = cache.slid.get(span.start)
                if before is not None and span.start < cache.window_base:
                    available.windows[span.start] = before.windows[span.start]
                    continue
                if kv is None:
                    kv = cache.gather(span.start, span.end, CacheGroup.WINDOW)
                available.windows[span.start] = self.store.save_block(window, ids, kv)
        for end in cache.snapshots:
            span = self.store.state_span(TENANT, ids, spans, end)
            kv = cache.gather_snapshot(end)
            available.states[end] = self.store.save_block(span, ids, kv)
        return available


@contextmanager
def shelf_at(folder: Path, engine: Engine) -> Iterator[Shelf]:
    """Open a shelf for an engine's caches in an empty folder."""
    disk = PosixDisk(folder, "none")
    blocks = BlockStore(disk, engine.spec, FINGERPRINT)
    records = ManifestStore(disk, CLUSTER_KEY)
    yield Shelf(AgentStore(blocks, records, CLUSTER_KEY, FINGERPRINT, engine.spec), blocks)
    disk.close()
