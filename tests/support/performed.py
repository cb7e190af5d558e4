"""A run of a scenario by a given speaker."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from router.scenario.fabric_client import FabricClient
from router.scenario.run_events import RunEvent
from router.scenario.series import ArmRun, Series, SeriesPlan

EventHandler = Callable[[RunEvent], object]


def performed(
    plan: SeriesPlan, speaker: FabricClient, folder: Path, on_event: EventHandler = lambda _: None
) -> ArmRun:
    """Perform a plan of one arm, with its journal in `folder`; pass its events to `on_event`."""

    @contextmanager
    def watch(*_: object) -> Iterator[EventHandler]:
        yield on_event

    series = Series(plan, speaker, folder, watch)
    asyncio.run(series.run())
    (only,) = series.arm_runs
    return only
