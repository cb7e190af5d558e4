"""Chart of a study: bars of the mean time to first token, one group per cell, log scale."""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any, Final

from fabric.errors import RejectedError
from router.simulate.study import Cell

BAR_INCHES, LEAST_INCHES, HEIGHT_INCHES = 0.16, 7.0, 5.0
BARS_SHARE: Final = 0.8  # of a group's width
METADATA: Final = {
    "png": {"Software": None},
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
}


def require_drawing() -> None:
    """Raise RejectedError if what draws charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        message = "charts need matplotlib: install macfabric[bench], or leave out --html and --png"
        raise RejectedError(message, code="not_installed")


def draw(cells: Sequence[Cell], kind: str) -> bytes:
    """Return the chart of a study's cells as a file, `png` or `svg`; equal ones as equal bytes."""
    from matplotlib import rc_context  # a second to load, which only this needs
    from matplotlib.figure import Figure

    count = max(len(cell.compared) for cell in cells)
    width = max(LEAST_INCHES, BAR_INCHES * (count + 2) * len(cells))
    figure = Figure(figsize=(width, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    for at, name in enumerate(each.policy for each in cells[0].compared):
        _bars(axes, cells, at, name, BARS_SHARE / count)
    axes.set_yscale("log")
    axes.set_ylabel("mean seconds to first token, 95 % intervals")
    axes.set_xticks(range(len(cells)), [_label(cell) for cell in cells])
    axes.grid(visible=True, axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "macfabric", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, metadata=METADATA[kind])
    return file.getvalue()


def _bars(axes: Any, cells: Sequence[Cell], at: int, name: str, width: float) -> None:
    """Draw one policy's bars."""
    means = [cell.compared[at].ttft_mean_s for cell in cells]
    errors = [
        [each.mean - max(each.low, 1e-3) for each in means],
        [each.high - each.mean for each in means],
    ]
    places = [cell + (at + 0.5) * width - BARS_SHARE / 2 for cell in range(len(cells))]
    axes.bar(places, [each.mean for each in means], width, label=name, yerr=errors)


def _label(cell: Cell) -> str:
    load = "" if cell.plan.load is None else f"\n{cell.plan.load:.0%}"
    return f"{cell.plan.name[:12]}{load}"
