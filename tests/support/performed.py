"""One performance of a scenario by given speakers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from router.scenario.run_events import RunEvent
from router.scenario.series import Performed, Series, SeriesPlan
from router.scenario.speaker import ScenarioSpeaker

Told = Callable[[RunEvent], object]


def performed(
    plan: SeriesPlan, speaker: ScenarioSpeaker, folder: Path, tell: Told = lambda _: None
) -> Performed:
    """Perform a plan of one arm, with its journal in `folder`; `tell` hears its events."""

    @contextmanager
    def watch(*_: object) -> Iterator[Told]:
        yield tell

    series = Series(plan, speaker, folder, watch)
    asyncio.run(series.perform())
    (only,) = series.performed
    return only
