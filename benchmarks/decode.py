"""Decode eight agents with our 4-bit caches and with mlx-lm's full-precision batch.

Both run the same random model in this process and alternate. The caches are synthetic: only the
step is measured, not the prompt.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from benchmarks import graph_nodes, workload
from benchmarks.contest import contest, judged_clock, rate_ratios, rates
from benchmarks.report import Limit, Report, say
from benchmarks.workload import Geometry
from fabric.turn.generation import Sampling
from node.mlx.engine import Engine

DESCRIPTION = "tokens per second of 8 agents, equal and unequal, against mlx-lm's own batch"

AGENTS = 8
MODEL = Geometry(512, 1_536, 2, 8, 2, 64, 2_048)
QUICK_MODEL = Geometry(128, 256, 1, 2, 1, 64, 512)
EQUAL_TOKENS = (2_048, 512)  # the first is judged
LONGEST_TOKENS, OTHERS_TOKENS = 65_536, 1_024  # of one agent, and of each other one
QUICK_LONGEST_TOKENS = 16_384
ROUNDS = 16
SHORTER_ROUNDS = 5  # of loads that are not judged, or take long and need no precision
STEPS = 3  # per round: other load on the machine changes within seconds

EQUAL_RATIO_MIN = 0.95
UNEQUAL_RATIO_MIN = 4.0
EXTRA_MEMORY_RATIO_MAX = 0.05
NODES_MAX = 13.0  # of a step's graph, per layer and additional sequence
NOTE = (
    "weights are random float32; as installed, MLX multiplies slowly on Linux, for both alike; a "
    "preloaded BLAS library speeds up full precision only, and the ratio at equal lengths falls"
)
QUICK_NOTE = "a quick run judges no speed"
_FOREVER = 1 << 20
_ROOM_TOKENS = 512  # reserved by a node for an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of the judged equal load (default: %(default)s)"
    )


class Ours:
    """The node's engine, with a 4-bit cache for each agent."""

    def __init__(self, engine: Engine, tokens: list[int], lengths: Sequence[int]) -> None:
        self._engine = engine
        greedy = Sampling(max_tokens=_FOREVER, ignore_eos=True)
        caches = workload.resident_caches(engine, tokens, lengths, _ROOM_TOKENS)
        self._slots = [
            engine.start(cache, [0] * (count + 1), greedy, seed)
            for seed, (cache, count) in enumerate(zip(caches, lengths, strict=True))
        ]

    def step(self) -> int:
        """Decode one token for each agent; return the number of tokens read."""
        prepared = self._engine.prepare(self._slots)
        read_count = sum(self._engine.read(slot) is not None for slot in self._slots)
        self._engine.check()
        self._engine.launch(prepared)
        return read_count

    def finish(self) -> None:
        """Wait for the step that was launched last."""
        mx.synchronize()


class UpstreamBatch:
    """mlx-lm's BatchGenerator with full-precision caches, padded to the longest."""

    def __init__(self, model: Any, tokens: list[int], lengths: Sequence[int]) -> None:
        self._generator = BatchGenerator(model, max_tokens=_FOREVER)
        self._caches = workload.stock_caches(model, tokens, lengths)

    def step(self) -> int:
        """Decode one token for each agent; the first call forms the batch."""
        if self._caches:
            count = len(self._caches)
            lengths = [layers[0].offset for layers in self._caches]
            tokens = [[0] * length for length in lengths]
            self._generator.insert([[0]] * count, caches=self._caches, all_tokens=tokens)
            self._caches = []
        return len(self._generator.next()[1])

    def finish(self) -> None:
        """Wait for the step that was launched last."""
        mx.synchronize(self._generator.stream)


def burst(contestant: Ours | UpstreamBatch, steps: int) -> int:
    """Decode some steps to the end; return the number of tokens."""
    tokens = sum(contestant.step() for _ in range(steps))
    contestant.finish()
    return tokens


def first_steps(contestant: Ours | UpstreamBatch) -> dict[str, float]:
    """Return the first steps' memory beside the agents' caches, and their time."""
    mx.clear_cache()
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    burst(contestant, STEPS)
    extra_bytes = mx.get_peak_memory() - held_bytes
    return {"extra_peak_mb": extra_bytes / 1e6, "first_steps_s": time.perf_counter() - began}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the measurement."""

    shape: Geometry
    loads: Mapping[str, tuple[int, ...]]  # each agent's tokens
    rounds: Mapping[str, int]


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the command line requests."""
    shape, longest = MODEL, LONGEST_TOKENS
    equal: tuple[int, ...] = EQUAL_TOKENS
    if arguments.quick:
        shape, longest, equal = QUICK_MODEL, QUICK_LONGEST_TOKENS, EQUAL_TOKENS[1:]
    loads = {f"equal_{count}": (count,) * AGENTS for count in equal}
    loads["unequal"] = (longest, *[OTHERS_TOKENS] * (AGENTS - 1))
    rounds = dict.fromkeys(loads, 1 if arguments.quick else SHORTER_ROUNDS)
    if not arguments.quick:
        rounds[f"equal_{equal[0]}"] = arguments.rounds
    return Plan(shape, loads, rounds)


def compare(
    load: str, engine: Engine, model: Any, plan: Plan
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return each contestant's figures under one load, and the ratios of ours to mlx-lm."""
    lengths = plan.loads[load]
    tokens = workload.pattern(plan.shape.vocabulary)
    say(f"{load}: filling the caches, forming the batches")
    ours = Ours(engine, tokens, lengths)
    figures = {"macfabric": first_steps(ours)}
    upstream = UpstreamBatch(model, tokens, lengths)
    figures["mlx_lm"] = first_steps(upstream)
    works = {"macfabric": partial(burst, ours, STEPS), "mlx_lm": partial(burst, upstream, STEPS)}
    spent = contest(load, works, plan.rounds[load])
    for side, turns in spent.items():
        assert all(one.tokens_count == len(lengths) * STEPS for one in turns), "tokens were lost"
        figures[side] |= rates(turns)
    ratios = rate_ratios(spent["macfabric"], spent["mlx_lm"])
    extra = [figures[side]["extra_peak_mb"] for side in ("macfabric", "mlx_lm")]
    return figures, ratios | {"extra_peak": extra[0] / extra[1]}


def run(arguments: argparse.Namespace) -> Report:
    """Compare under equal and under unequal load."""
    plan = plan_of(arguments)
    model = workload.build_model(plan.shape)
    engine = workload.build_engine(model)
    figures: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    for load in plan.loads:
        found, related = compare(load, engine, model, plan)
        figures |= {f"{load} {side}": values for side, values in found.items()}
        ratios |= {f"{load}.{name}": value for name, value in related.items()}
    host = {
        "graph nodes": graph_nodes.nodes_by_sequence(engine),
        "host microseconds": graph_nodes.host_us_by_sequence(engine),
    }
    parameters = {
        "model": plan.shape.as_parameters(),
        "dtype": "float32",
        "agents_tokens": {load: list(lengths) for load, lengths in plan.loads.items()},
        "rounds": dict(plan.rounds),
        "steps_per_round": STEPS,
        "judged_clock": judged_clock(),
    }
    notes = (NOTE, QUICK_NOTE) if arguments.quick else (NOTE,)
    nodes = Limit(
        "graph nodes by layer and sequence", host["graph nodes"], NODES_MAX, is_least=False
    )
    return Report(
        parameters,
        {"load": figures, "one more sequence, by layer": {"macfabric": host}},
        ratios,
        (*limits(ratios, is_quick=arguments.quick), nodes),
        notes,
    )


def limits(ratios: Mapping[str, float], *, is_quick: bool) -> tuple[Limit, ...]:
    """Return the limits of the ratios."""
    memory = Limit(
        "extra peak memory over mlx-lm's, unequal",
        ratios["unequal.extra_peak"],
        EXTRA_MEMORY_RATIO_MAX,
        is_least=False,
    )
    if is_quick:
        return (memory,)
    clock, equal = judged_clock(), f"equal_{EQUAL_TOKENS[0]}"
    bounds = {equal: EQUAL_RATIO_MIN, "unequal": UNEQUAL_RATIO_MIN}
    speed = (
        Limit(f"tokens/s over mlx-lm's, {load}, {clock} time", value, bound, is_least=True)
        for load, bound in bounds.items()
        for value in (ratios[f"{load}.{clock}"],)
    )
    return (*speed, memory)
