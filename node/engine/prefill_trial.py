"""Measure this node's prefill speed at start, and choose how it multiplies keys and values.

The router places turns by that speed. Without a first figure, the first node to serve a turn would
look faster than all others.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from fabric.errors import FabricError
from fabric.ports import Clock
from node.engine.engine_thread import EngineThread
from node.mlx import attention
from node.mlx.form_trial import choose_forms
from node.mlx.packed_product import use_forms

TRIAL_TOKENS = 128  # shorter chunks measure the overhead, not the speed
TRIAL_RUNS_MAX = 3  # the first one may load weights and build kernels
TRIAL_S = 1.0  # another run begins only before that
_WORDS = "one two three four five six seven eight nine ten eleven twelve "

_log = logging.getLogger(__name__)


def trial_tokens(encode: Callable[[str], Sequence[int]], context_tokens_max: int) -> list[int]:
    """Return a short prompt of ordinary words."""
    count = min(TRIAL_TOKENS, context_tokens_max // 2)
    return list(encode(_WORDS * count)[:count])


async def measure_prefill(engine: EngineThread, clock: Clock, tokens: list[int]) -> None:
    """Measure the prefill speed of a short prompt, and choose the forms of attention's products."""
    try:
        await asyncio.wrap_future(engine.call(lambda: _measure(engine, clock, tokens)))
    except FabricError as error:
        _log.warning("cannot measure the prefill speed: %s", error.message)


def _measure(thread: EngineThread, clock: Clock, tokens: list[int]) -> None:
    engine = thread.engine
    began_s, best_s = clock.monotonic_s(), float("inf")
    for _ in range(TRIAL_RUNS_MAX):
        cache = engine.new_cache(len(tokens))
        run_s = clock.monotonic_s()
        with attention.observing() as calls:
            engine.prefill(cache, tokens)
        ended_s = clock.monotonic_s()
        best_s = min(best_s, ended_s - run_s)
        if ended_s - began_s > TRIAL_S:
            break
    thread.prefill_speed.start(len(tokens), best_s)
    if calls:
        use_forms(choose_forms(engine.spec, calls[0].heads, clock))
