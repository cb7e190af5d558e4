"""Restore from SSD to ready-to-decode, against a raw read of the same bytes into a resident buffer.

Block files of a real model's geometry are written by the node's own store and read back by the
node's own load path, which checks and places every byte. The raw read opens the same files, reads
each by one `preadv` and computes the same checksum, with as many threads. Both targets are resident
before the clock starts; the cost of allocating the cache is a separate figure.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks.memory import GEOMETRIES, half_precision_spec
from benchmarks.report import Limit, Report, say
from fabric.ids import Fingerprint, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.kvcache.hashing import payload_checksum
from fabric.limits import BLOCK_TOKENS
from fabric.record.layout import Layout
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.descriptors import OpenPayload
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import PosixDisk
from node.store.staging import Place
from node.tiers.restore import BlockReads, load_layout

DESCRIPTION = "bytes from SSD to ready-to-decode, against a raw read with the same checksums"

MODEL = "Llama 3.1 8B"
CONTEXTS = (1_024, 8_192, 32_768)
QUICK = (1_024,)
ROUNDS = 7
THREADS = (1, 2)
SHARE_MIN = 0.9  # of the raw read's speed with as many threads
GAIN_MIN = 1.7  # gain by the second thread, or SHARE_MIN of the raw read's gain, if less
KEY = bytes(range(32))
FINGERPRINT = Fingerprint(b"r" * 32)
TENANT = TenantId("bench")
PROBED_FILES = 4  # a few pages of new files stay in separate kernel lists


@dataclass(frozen=True, slots=True)
class Library:
    """A context's blocks on disk, and the offsets of their payloads."""

    store: AgentStore
    spec: ModelCacheSpec
    ids: list[int]
    layout: Layout

    def kv_bytes(self, tokens_count: int) -> int:
        """Return the cache bytes of `tokens_count` restored tokens."""
        return self.spec.kv_bytes(tokens_count)

    def opened(self, ref: BlockRef) -> OpenPayload:
        """Open a block's file."""
        lent = self.store.blocks.open_payload(ref).payload
        assert isinstance(lent, OpenPayload), "the folder is not encrypted"
        return lent

    def drop(self, blocks_count: int) -> None:
        """Drop the files' pages from the page cache."""
        for ref in self.layout.blocks[:blocks_count]:
            file = self.opened(ref)
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            file.close()

    def can_drop(self) -> bool:
        """Return whether the system drops pages on request; call it once, as it reads pages."""
        if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
            return False
        self.drop(PROBED_FILES)
        cached = 0
        for ref in self.layout.blocks[:PROBED_FILES]:
            file = self.opened(ref)
            cached += _is_cached(file.descriptor, file.start + file.length // 2)
            file.close()
        return cached <= PROBED_FILES // 2


@dataclass(frozen=True, slots=True)
class Times:
    """One round's times of the raw read and of the restore, by the number of threads."""

    raw_s: dict[int, float]
    restore_s: dict[int, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--folder", help="where to write, on the drive to measure")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="reads of each kind")


def run(arguments: argparse.Namespace) -> Report:
    """Measure every context, warm and cold."""
    contexts = QUICK if arguments.quick else CONTEXTS
    rounds = 3 if arguments.quick else arguments.rounds
    figures: dict[str, dict[str, float]] = {}
    shares: dict[str, float] = {}
    gains: dict[str, float] = {}
    raw_gains: dict[str, float] = {}
    notes = ["both targets are in memory before the clock starts; 'allocated' includes the cache's"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        library = write_library(Path(folder), half_precision_spec(GEOMETRIES[MODEL]), max(contexts))
        can_drop = library.can_drop()
        for count in contexts:
            kinds = {"warm": False} | ({"cold": True} if can_drop else {})
            for kind, cold in kinds.items():
                say(f"{count} tokens, {kind} page cache")
                rows = measure(library, count, rounds, cold=cold)
                name = f"{count:,} tokens, {kind}"
                for threads in THREADS:
                    key = f"{name}, {threads} threads" if threads > 1 else f"{name}, 1 thread"
                    shares[key] = statistics.median(
                        row.raw_s[threads] / row.restore_s[threads] for row in rows
                    )
                    figures[key] = _row(library.kv_bytes(count), rows, threads)
                gains[name] = _gain([row.restore_s for row in rows])
                raw_gains[name] = _gain([row.raw_s for row in rows])
            warm = figures[f"{count:,} tokens, warm, 1 thread"]
            warm["allocated ms"] = 1e3 * _allocated_s(library, count)
    if not can_drop:
        notes.append("this system does not let a program drop pages: nothing was measured cold")
    limits = tuple(
        Limit(f"{name}: share of the raw read's speed", share, SHARE_MIN, is_least=True)
        for name, share in shares.items()
    ) + tuple(
        Limit(
            f"{name}: {THREADS[-1]} threads over 1",
            gain,
            min(GAIN_MIN, SHARE_MIN * raw_gains[name]),
            is_least=True,
        )
        for name, gain in gains.items()
    )
    parameters = {"model": MODEL, "rounds": rounds, "block_tokens": BLOCK_TOKENS}
    return Report(parameters, {"restore": figures}, shares | gains, limits, tuple(notes))


def write_library(folder: Path, spec: ModelCacheSpec, tokens_count: int) -> Library:
    """Write a context's full blocks, with arbitrary contents, as a node does."""
    say(f"writing {spec.kv_bytes(tokens_count) / 1e9:.2f} GB")
    disk = PosixDisk(folder, "full")
    disk.recover()
    blocks = BlockStore(disk, spec, FINGERPRINT)
    store = AgentStore(blocks, ManifestStore(disk, KEY), KEY, FINGERPRINT, spec)
    rng = np.random.default_rng(0)
    ids: list[int] = rng.integers(0, 1 << 17, tokens_count).tolist()
    for span in store.spans(TENANT, ids):
        kv = rng.bytes(spec.kv_bytes(BLOCK_TOKENS))
        store.save_block(span, ids, memoryview(kv))
    return Library(store, spec, ids, store.shared_prefix(TENANT, ids))


def measure(library: Library, tokens_count: int, rounds: int, *, cold: bool) -> list[Times]:
    """Time both reads with each number of threads, `rounds` times after an unmeasured one."""
    blocks_count = tokens_count // BLOCK_TOKENS
    buffer = np.zeros(library.kv_bytes(tokens_count), np.uint8)
    cache = ResidentCache(library.spec, tokens_count)
    rows = []
    for _ in range(rounds + 1):
        times = Times({}, {})
        for threads in THREADS:
            library.store.blocks.readers_count = threads
            for into, read in (
                (times.raw_s, lambda count=threads: raw_read(library, buffer, count)),
                (times.restore_s, lambda: restore(library, cache)),
            ):
                if cold:
                    library.drop(blocks_count)
                into[threads] = _seconds(read)
        rows.append(times)
    return rows[1:]


def raw_read(library: Library, buffer: Place, threads: int) -> None:
    """Read payloads of as many files as fill `buffer`, each by one system call, with checksums."""
    size = library.kv_bytes(BLOCK_TOKENS)

    def read(index: int) -> None:
        file = library.opened(library.layout.blocks[index])
        into = buffer[index * size : (index + 1) * size]
        count = os.preadv(file.descriptor, [into.data], file.start)
        file.close()
        assert count == size, "the file is too short"
        payload_checksum([into.data])

    count = buffer.nbytes // size
    assert BlockReads(count, read).run(threads) == (count, None)


def restore(library: Library, cache: ResidentCache) -> None:
    """Restore the beginning of the context into `cache` as a node does before it decodes."""
    count = cache.leaves[0].capacity_tokens
    cache.rewind(0)
    layout = library.layout.cut(count)
    loaded = load_layout(library.store, TENANT, library.ids, layout, cache)
    assert loaded.tokens_count == count, "a block is damaged"


def _allocated_s(library: Library, tokens_count: int) -> float:
    def whole() -> None:
        restore(library, ResidentCache(library.spec, tokens_count))
        mx.clear_cache()  # so that the next one allocates its memory again

    return min(_seconds(whole) for _ in range(2))


def _gain(rounds: Sequence[dict[int, float]]) -> float:
    """Return the speed-up of all threads over one, for each round."""
    return statistics.median(times[THREADS[0]] / times[THREADS[-1]] for times in rounds)


def _row(size_bytes: int, rows: Sequence[Times], threads: int) -> dict[str, float]:
    raw_s = statistics.median(row.raw_s[threads] for row in rows)
    restore_s = statistics.median(row.restore_s[threads] for row in rows)
    return {
        "MB": size_bytes / 1e6,
        "raw GB/s": size_bytes / raw_s / 1e9,
        "restore GB/s": size_bytes / restore_s / 1e9,
        "restore ms": 1e3 * restore_s,
    }


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _is_cached(descriptor: int, start: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot report it, such as one in memory
        return True
