"""Nodes whose steps take a stated time, on a machine that computes them faster.

Three nodes on one machine share its cores, so their speeds are not independent. Here each prefill
chunk and each decode step of a node lasts at least as long as at the stated speed; the engine's
thread sleeps for the rest. Computation, storage and transfers are unchanged. Steps that the machine
computes more slowly than stated are counted as late.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from node import service
from node.mlx.engine import Engine, Logits
from node.mlx.loaded_model import LoadedModel, load_model


@dataclass(slots=True)
class Pace:
    """Speeds of one node, and the number of its late steps."""

    prefill_tokens_per_s: float
    decode_steps_per_s: float
    steps_count: int = 0
    late_count: int = 0

    def times(self, factor: float) -> "Pace":
        """Return the pace of a device that is `factor` times as fast."""
        return Pace(self.prefill_tokens_per_s * factor, self.decode_steps_per_s * factor)

    def wait(self, began_s: float, seconds: float) -> None:
        """Wait until a step has lasted `seconds`."""
        left_s = began_s + seconds - time.perf_counter()
        self.steps_count += 1
        if left_s > 0:
            time.sleep(left_s)
        else:
            self.late_count += 1


@dataclass(slots=True)
class Paces:
    """Speeds of all nodes, in the order of their starts."""

    nodes: Sequence[Pace] = field(default_factory=tuple)

    @property
    def late_share(self) -> float:
        """Share of all steps that were late."""
        steps_count = sum(pace.steps_count for pace in self.nodes)
        return sum(pace.late_count for pace in self.nodes) / max(1, steps_count)


@contextmanager
def paced_nodes(paces: Paces) -> Iterator[None]:
    """Slow down the engines of the nodes that start within the block."""
    unused = iter(paces.nodes)

    def load_paced(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*arguments, **options)
        slow_down(loaded.engine, next(unused))
        return loaded

    # The only access to a node's engine before it measures its speed.
    with patch.object(service, "load_model", load_paced):
        yield


def slow_down(engine: Engine, pace: Pace) -> None:
    """Have each chunk and each step of an engine last at least as long as at a pace."""
    prefill, launch = engine.prefill, engine.launch

    def prefill_paced(cache: Any, tokens: list[int]) -> Logits:
        began_s = time.perf_counter()
        logits = prefill(cache, tokens)
        pace.wait(began_s, len(tokens) / pace.prefill_tokens_per_s)
        return logits

    def launch_paced(step: Any) -> None:
        began_s = time.perf_counter()
        launch(step)
        pace.wait(began_s, 1 / pace.decode_steps_per_s)

    engine.prefill = prefill_paced  # type: ignore[method-assign]
    engine.launch = launch_paced  # type: ignore[method-assign]
