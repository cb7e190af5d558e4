"""Measure the bytes copied by appending one token to long caches, by time of launch.

A cache that a running step reads cannot be written in place: a step launched meanwhile copies it.
The engine builds a step while the device runs the one before, and launches it after that; this is
compared with steps that are not built early, and with steps that are launched early.
MLX's CPU backend copies as its GPU backends do, but lets the host run ahead by only some hundred
operations. So the model has one layer of few operations, of which one takes long before the cache
is read.
"""

import argparse
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from benchmarks import workload
from benchmarks.report import Limit, Report, say
from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec, SlotSpec
from fabric.limits import MIB
from node.mlx.attention import attend
from node.mlx.engine import DecodeSlot, Engine
from node.mlx.model_limits import ModelLimits
from node.mlx.resident_cache import ResidentCache

DESCRIPTION = "memory that decode steps copy after long contexts, by time of launch"

HEADS, WIDTH, VOCABULARY = 8, 128, 1_024
BUSY_WIDTH = 640  # of the product that keeps the device busy
AGENTS = 8
TOKENS, QUICK_TOKENS = 16_384, 1_024
STEPS, QUICK_STEPS = 50, 4
_ROOM_TOKENS = 512
EXTRA_RATIO_MAX = 1.1  # of steps prepared early over steps that wait
COPIED_SHARE_MAX = 0.01  # of the caches, by a step prepared early

Step = Callable[[Engine, list[DecodeSlot]], None]


class SlowModel(nn.Module):  # type: ignore[misc]  # MLX has no types for it
    """A model of one attention layer whose queries take long."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.busy = mx.random.normal((BUSY_WIDTH, BUSY_WIDTH))

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Return logits `[batch, 1, vocabulary]`."""
        hidden = self.embed(tokens)
        heads = hidden.reshape(*tokens.shape, HEADS, WIDTH).swapaxes(1, 2)
        keys, values = cache[0].update_and_fetch(heads, heads)
        queries = heads + (self.busy @ self.busy)[0, 0] * 1e-9
        out = attend(queries, keys, values, cache[0], WIDTH**-0.5, None)
        return self.embed.as_linear(out.swapaxes(1, 2).reshape(hidden.shape))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each context")


def wait(engine: Engine, slots: list[DecodeSlot]) -> None:
    """Build and launch a step after all tokens were read."""
    _read(engine, slots)
    engine.launch(engine.prepare(slots))


def prepare(engine: Engine, slots: list[DecodeSlot]) -> None:
    """Build a step early and launch it after all tokens were read, as the node does on a GPU."""
    prepared = engine.prepare(slots)
    _read(engine, slots)
    engine.launch(prepared)


def hurry(engine: Engine, slots: list[DecodeSlot]) -> None:
    """Launch a step while the previous one runs, and wait for the previous one."""
    before = [slot.pending for slot in slots]
    engine.launch(engine.prepare(slots))
    mx.eval(before)


def run(arguments: argparse.Namespace) -> Report:
    """Measure each order on its own caches."""
    tokens = QUICK_TOKENS if arguments.quick else arguments.tokens
    steps = QUICK_STEPS if arguments.quick else STEPS
    orders: dict[str, Step] = {"waits": wait, "prepared early": prepare, "launched early": hurry}
    figures = {}
    for name, step in orders.items():
        say(f"{name}: {steps} steps behind {AGENTS} contexts of {tokens:,} tokens")
        figures[name] = measure(step, agents=AGENTS, tokens=tokens, steps=steps)
    extra = {name: row["extra peak MiB"] for name, row in figures.items()}
    copied = {name: row["copied MiB"] / row["caches MiB"] for name, row in figures.items()}
    ratio = extra["prepared early"] / extra["waits"]
    limits = (
        Limit("extra peak, prepared early by waiting", ratio, EXTRA_RATIO_MAX, is_least=False),
        Limit(
            "copied by a step prepared early, of its caches",
            copied["prepared early"],
            COPIED_SHARE_MAX,
            is_least=False,
        ),
    )
    parameters = {"agents": AGENTS, "tokens": tokens, "steps": steps, "heads": HEADS}
    ratios = {"copied by a step launched early, of its caches": copied["launched early"]}
    return Report(parameters, {"steps": figures}, ratios, limits)


def measure(step: Step, *, agents: int, tokens: int, steps: int) -> dict[str, float]:
    """Return the memory and the copied cache bytes of steps in one order."""
    engine, slots = _started(agents, tokens)
    caches = [slot.cache for slot in slots]
    mx.clear_cache()
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    copied_bytes = 0
    for _ in range(steps // 2):
        places = _places(caches)
        step(engine, slots)
        step(engine, slots)
        engine.check()
        moved = zip(places, _places(caches), strict=True)
        copied_bytes += sum(size for (was, size), (now, _) in moved if was != now)
    return {
        "caches MiB": sum(cache.size_bytes for cache in caches) / MIB,
        "extra peak MiB": (mx.get_peak_memory() - held_bytes) / MIB,
        "copied MiB": copied_bytes / (steps // 2) / MIB,  # by the second step of two
    }


def _started(agents: int, tokens: int) -> tuple[Engine, list[DecodeSlot]]:
    mx.random.seed(0)
    model = SlowModel()
    slot = SlotSpec("keys", HEADS, WIDTH, 4, 64, "F32")
    layer = LayerSpec(LayerKind.FULL, slots=(slot, SlotSpec("values", HEADS, WIDTH, 4, 64, "F32")))
    engine = Engine(model, ModelCacheSpec((layer,)), limits=ModelLimits(VOCABULARY))
    slots = workload.filled_slots(engine, agents, tokens, _ROOM_TOKENS)
    engine.launch(engine.prepare(slots))
    engine.check()
    return engine, slots


def _places(caches: list[ResidentCache]) -> list[tuple[int, int]]:
    """List the address and size of each array."""
    arrays = [array for cache in caches for leaf in cache.leaves for array in leaf.state]
    rows = [np.frombuffer(memoryview(array).cast("B"), np.uint8) for array in arrays]
    return [(row.ctypes.data, row.nbytes) for row in rows]


def _read(engine: Engine, slots: list[DecodeSlot]) -> None:
    for slot in slots:
        engine.read(slot)
    engine.check()
