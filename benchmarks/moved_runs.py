"""Measure a decode step's cost per run of moved rows.

Every run has moved by another distance from where it was computed, so its keys need queries rotated
by that distance.
"""

import argparse
import statistics
import time

import mlx.core as mx

from benchmarks import workload
from benchmarks.contest import judged_clock
from benchmarks.report import Limit, Report, say
from benchmarks.workload import Geometry
from fabric.kvcache.arrangement import Move
from fabric.turn.generation import Sampling
from node.mlx.engine import DecodeSlot, Engine

DESCRIPTION = "a decode step after 1 to 256 edits, against one without"

RUNS, QUICK_RUNS = (1, 16, 64, 256), (1, 64)
MODEL = Geometry(512, 1_536, 2, 8, 2, 64, 2_048)
TOKENS, QUICK_TOKENS = 8_192, 1_024
ROUNDS, QUICK_ROUNDS = 12, 2
STEPS = 3  # per round
TIMES_MAX = {64: 1.2, 256: 1.5}
_FOREVER = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--tokens", type=int, default=TOKENS, help="(default: %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    """Decode alternately with caches of different numbers of runs."""
    counts = (0, *(QUICK_RUNS if arguments.quick else RUNS))
    tokens = QUICK_TOKENS if arguments.quick else arguments.tokens
    engine = workload.build_engine(workload.build_model(MODEL))
    say("filling the caches, moving their rows")
    slots = {count: _slot(engine, tokens, count) for count in counts}
    spent: dict[int, list[float]] = {count: [] for count in counts}
    clock = time.perf_counter if judged_clock() == "wall" else time.process_time
    for _ in range(1 + (QUICK_ROUNDS if arguments.quick else ROUNDS)):
        for count, slot in slots.items():
            began_s = clock()
            for _ in range(STEPS):
                engine.launch(engine.prepare([slot]))
                engine.read(slot)
            mx.synchronize()
            spent[count].append((clock() - began_s) / STEPS)
    step_s = {count: statistics.median(taken[1:]) for count, taken in spent.items()}
    times = {count: step_s[count] / step_s[0] for count in counts[1:]}
    limits = [
        Limit(f"step behind {count} edits by one without", times[count], bound, is_least=False)
        for count, bound in TIMES_MAX.items()
        if count in times
    ]
    parameters = {"model": MODEL.as_parameters(), "tokens": tokens, "judged_clock": judged_clock()}
    figures = {"step_s": {str(count): seconds for count, seconds in step_s.items()}}
    ratios = {f"{count} runs": ratio for count, ratio in times.items()}
    return Report(parameters, figures, ratios, tuple(limits))


def _slot(engine: Engine, tokens: int, runs: int) -> DecodeSlot:
    """Return a cache of about `tokens` tokens, with one token removed before each run."""
    pattern = workload.pattern(MODEL.vocabulary)
    [cache] = workload.resident_caches(engine, pattern, [tokens], _room(tokens))
    size, moves = tokens // (runs + 1), []
    for number in range(runs + 1 if runs else 0):
        start = number * size
        moves.append(Move(start, start + size - 1, start - number))
    if moves:
        cache.rearrange(moves)
        cache.settle()
    assert len(cache.shifts) == runs, "runs have equal shifts"
    greedy = Sampling(max_tokens=_FOREVER, ignore_eos=True)
    return engine.start(cache, [0] * (cache.tokens_count + 1), greedy, 0)


def _room(tokens: int) -> int:
    return tokens // 2
