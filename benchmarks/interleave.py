"""Measure a running stream and a warm request beside the prefill of a long prompt.

On a real engine thread, one stream decodes first alone, then beside the prefill of a cold prompt,
during which warm requests arrive one after the other.
"""

import argparse
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer

from benchmarks import workload
from benchmarks.report import Limit, Report, say
from benchmarks.workload import Geometry
from fabric.hosting.clock import SystemClock
from fabric.turn.generation import Sampling
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceEvent, SequenceInput
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.engine import Engine, Logits
from node.mlx.loaded_model import model_folder
from node.mlx.resident_cache import ResidentCache

DESCRIPTION = "a stream's token intervals and a warm request's wait while a prompt is computed"

MODEL = Geometry(64, 128, 2, 2, 1, 32, 2_048)
TOKENIZER = "prose"  # of the same vocabulary; the text does not matter
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 16_384, 2_048
STREAM_TOKENS = 64
WARM_TOKENS, WARM_NEW_TOKENS = 2_048, 32
WARM_REQUESTS, QUICK_WARM_REQUESTS = 5, 1
QUIET_INTERVALS = 200
INTERVALS_MAX = 2.0  # other than the chunk
WARM_ITERATIONS_MAX = 2
TIMEOUT_S = 600.0
QUIET, BESIDE, CHUNK = "interval, quiet", "interval, beside the prefill", "prefill chunk"
NOTE = (
    "iterations are counted by prefill chunks: an iteration of the engine decodes everyone one "
    "step, then computes one chunk; a warm request computes its own few tokens in one"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill call."""

    began_s: float
    ended_s: float
    tokens_count: int

    @property
    def spent_s(self) -> float:
        """Time for which decoding waited for the chunk."""
        return self.ended_s - self.began_s


class WatchedEngine(Engine):
    """The node's engine, which also records its prefill chunks."""

    def __init__(self, fitted: Engine) -> None:
        super().__init__(fitted.model, fitted.spec, packed=fitted.packed)
        self.batching = fitted.batching
        self.chunks: list[Chunk] = []
        self.chunk_begins = threading.Event()

    def prefill(self, cache: ResidentCache, tokens: list[int]) -> Logits:
        """Compute the cache of `tokens`, and record the times."""
        began_s = time.perf_counter()
        self.chunk_begins.set()
        logits = super().prefill(cache, tokens)
        self.chunks.append(Chunk(began_s, time.perf_counter(), len(tokens)))
        return logits


@dataclass(slots=True)
class SequenceLog:
    """Events of a sequence."""

    sequence: Sequence | None = None
    stamps_s: list[float] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def record(self, event: SequenceEvent) -> None:
        """Record an event; runs on the engine thread."""
        if isinstance(event, Produced):
            self.stamps_s.append(time.perf_counter())
            self.began.set()
        elif isinstance(event, Broke):
            self.failure = event.error
        if isinstance(event, (Ended, Broke)):
            self.began.set()
            self.ended.set()

    def wait(self, event: threading.Event) -> None:
        """Wait for the first token or the end; raise the sequence's error."""
        if not event.wait(TIMEOUT_S):
            message = f"nothing happened within {TIMEOUT_S:g} s"
            raise TimeoutError(message)
        if self.failure is not None:
            raise self.failure


class Bench:
    """An engine thread and methods to submit work."""

    def __init__(self) -> None:
        self._tokenizer = ChatTokenizer(load_tokenizer(model_folder(TOKENIZER)))
        self.thread = EngineThread(SystemClock(), active_max=8, waiting_max=32, exact_chunks=False)
        self.engine = self.thread.start(self._build)

    @staticmethod
    def _build() -> tuple[WatchedEngine, WatchedEngine]:
        watched = WatchedEngine(workload.build_engine(workload.build_model(MODEL)))
        return watched, watched

    def caches(self, tokens_count: int, caches_count: int) -> list[ResidentCache]:
        """Return caches of `tokens_count` tokens, filled without computing."""
        tokens = workload.pattern(MODEL.vocabulary)
        lengths = [tokens_count] * caches_count

        def make() -> list[ResidentCache]:
            return workload.resident_caches(self.engine, tokens, lengths, QUIET_INTERVALS)

        return self.thread.call(make).result()

    def submit(self, prompt_tokens: int, answer_tokens: int, cache: ResidentCache) -> SequenceLog:
        """Queue a prompt whose beginning is in `cache`."""
        log = SequenceLog()
        sampling = Sampling(max_tokens=answer_tokens, ignore_eos=True)
        rng = np.random.default_rng(prompt_tokens)
        prompt: list[int] = rng.integers(1, MODEL.vocabulary, prompt_tokens).tolist()
        request = SequenceInput(prompt, sampling, 0, frozenset(), self._tokenizer.token_text)
        answer = Answer(self._tokenizer, "", (), None)
        log.sequence = Sequence(request, cache=cache, answer=answer, emit=log.record)
        self.thread.submit(log.sequence)
        return log

    def empty_cache(self, capacity_tokens: int) -> ResidentCache:
        """Return an empty cache."""
        return self.thread.call(lambda: self.engine.new_cache(capacity_tokens)).result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--prompt-tokens", type=int, help=f"(default: {PROMPT_TOKENS})")


def intervals(stamps_s: list[float], began_s: float, ended_s: float) -> np.ndarray:
    """Return the intervals [s] between tokens that overlap a span of time."""
    pairs = itertools.pairwise(stamps_s)
    return np.array([b - a for a, b in pairs if b > began_s and a < ended_s])


@dataclass(slots=True)
class Observed:
    """Measurements of one run."""

    quiet_s: np.ndarray
    beside_s: np.ndarray
    chunks: list[Chunk]
    warm_iterations: list[int]
    warm_waits_s: list[float]


def observe(bench: Bench, prompt_tokens: int, warm_count: int) -> Observed:
    """Run a stream, prefill a long prompt beside it, and send warm requests meanwhile."""
    capacity = QUIET_INTERVALS + STREAM_TOKENS
    stream = bench.submit(STREAM_TOKENS, 1 << 20, bench.empty_cache(capacity))
    stream.wait(stream.began)
    while len(stream.stamps_s) <= QUIET_INTERVALS:
        time.sleep(0.05)
    quiet_s = np.diff(np.array(stream.stamps_s))
    say(f"quiet: median {1000 * np.median(quiet_s):.2f} ms between tokens")
    warm_caches = bench.caches(WARM_TOKENS, warm_count)
    bench.engine.chunks.clear()
    cold = bench.submit(prompt_tokens, 1, bench.empty_cache(prompt_tokens + 1))
    chunks = bench.engine.chunks
    iterations, waits_s = [], []
    for number, cache in enumerate(warm_caches, 1):
        # Spread over the prompt, each while a chunk is being computed.
        _wait_for_tokens(bench, prompt_tokens * number // (warm_count + 1))
        bench.engine.chunk_begins.clear()
        bench.engine.chunk_begins.wait(TIMEOUT_S)
        sent_s = time.perf_counter()
        warm = bench.submit(WARM_TOKENS + WARM_NEW_TOKENS + 1, 1, cache)
        warm.wait(warm.ended)
        first_s = warm.stamps_s[0]
        later_chunks = [chunk for chunk in list(chunks) if sent_s < chunk.began_s < first_s]
        iterations.append(len(later_chunks) + 1)
        waits_s.append(first_s - sent_s)
        say(f"warm request {number}: first token in {iterations[-1]} iterations")
    cold.wait(cold.ended)
    assert stream.sequence is not None, "the prompt was not submitted"
    stream.sequence.cancelled.set()
    stream.wait(stream.ended)
    beside_s = intervals(stream.stamps_s, chunks[0].began_s, chunks[-1].ended_s)
    return Observed(quiet_s, beside_s, list(chunks), iterations, waits_s)


def _wait_for_tokens(bench: Bench, tokens_count: int) -> None:
    done = 0
    while (now := sum(chunk.tokens_count for chunk in list(bench.engine.chunks))) < tokens_count:
        if now - done >= PROMPT_TOKENS // 8:
            done = now
            say(f"{done:,} prompt tokens computed")
        time.sleep(0.02)


def run(arguments: argparse.Namespace) -> Report:
    """Measure one run of the engine thread."""
    prompt_tokens = arguments.prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = QUICK_PROMPT_TOKENS if arguments.quick else PROMPT_TOKENS
    warm_count = QUICK_WARM_REQUESTS if arguments.quick else WARM_REQUESTS
    bench = Bench()
    try:
        observed = observe(bench, prompt_tokens, warm_count)
    finally:
        bench.thread.stop()
    quiet_ms, beside_ms = 1000 * observed.quiet_s, 1000 * observed.beside_s
    chunk_ms = 1000 * np.array([chunk.spent_s for chunk in observed.chunks])
    parameters: dict[str, Any] = {
        "model": MODEL.as_parameters(),
        "dtype": "float32",
        "prompt_tokens": prompt_tokens,
        "warm_tokens": [WARM_TOKENS, WARM_NEW_TOKENS],
        "chunk_tokens": sorted({chunk.tokens_count for chunk in observed.chunks}),
        "intervals": {"quiet": len(quiet_ms), "beside": len(beside_ms)},
        "device": str(mx.default_device()),
    }
    table = {
        QUIET: _spread(quiet_ms),
        BESIDE: _spread(beside_ms),
        CHUNK: _spread(chunk_ms),
        "warm request's first token": _spread(1000 * np.array(observed.warm_waits_s)),
    }
    figures = {"milliseconds": table, "warm_iterations": observed.warm_iterations}
    alone, beside, chunk = (table[row] for row in (QUIET, BESIDE, CHUNK))
    ratios = {f"{at} beside over quiet": beside[at] / alone[at] for at in ("p50", "p99")}
    allowed = {
        "p50": INTERVALS_MAX * alone["p50"] + chunk["p50"],
        "p99": INTERVALS_MAX * alone["p99"] + chunk["longest"],
    }
    limits = [
        Limit(
            f"{at} interval [ms] within {INTERVALS_MAX:g} quiet ones and a chunk",
            beside[at],
            most,
            is_least=False,
        )
        for at, most in allowed.items()
    ]
    warm = Limit(
        "iterations until a warm request's first token, worst",
        max(observed.warm_iterations),
        WARM_ITERATIONS_MAX,
        is_least=False,
    )
    return Report(parameters, figures, ratios, (*limits, warm), (NOTE,))


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "longest": float(values.max())}
