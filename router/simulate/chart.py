"""Chart of a study: bars of the mean time to first token, one group per cell, log scale."""

import math
from collections.abc import Sequence
from typing import Final

from router.simulate.pages import Colour, Page
from router.simulate.study import Cell

COLOURS: Final[tuple[Colour, ...]] = (
    *((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189)),
    *((140, 86, 75), (227, 119, 194), (127, 127, 127), (188, 189, 34), (23, 190, 207)),
)
BAR, GAP = 12, 22
LEFT, TOP, BOTTOM, RIGHT, PLOT = 60, 30, 40, 20, 300
GRID: Final[Colour] = (225, 225, 225)
AXIS: Final[Colour] = (90, 90, 90)
LEGEND_ROW, LEGEND_COLUMN = 18, 190


def size_of(cells: Sequence[Cell]) -> tuple[int, int]:
    """Return the width and height of a chart."""
    bars = max((len(cell.compared) for cell in cells), default=1)
    width = LEFT + RIGHT + max(1, len(cells)) * (bars * BAR + GAP)
    rows = math.ceil(bars / _columns(width))
    return max(width, 560), TOP + PLOT + BOTTOM + rows * LEGEND_ROW


def draw(page: Page, cells: Sequence[Cell]) -> None:
    """Draw a study's cells."""
    values = [each.ttft_mean_s.mean for cell in cells for each in cell.compared]
    low = 10.0 ** math.floor(math.log10(max(1e-3, min(values, default=0.1))))
    high = 10.0 ** math.ceil(math.log10(max(low * 10, max(values, default=1.0))))
    decades = round(math.log10(high / low))
    width, _ = size_of(cells)

    def height(value: float) -> float:
        share = math.log10(max(value, low) / low) / decades
        return PLOT * min(1.0, share)

    page.text(LEFT, 8, "mean seconds to first token, 95 % intervals")
    for decade in range(decades + 1):
        y = TOP + PLOT - PLOT * decade / decades
        page.box(LEFT, y, width - LEFT - RIGHT, 1, GRID)
        page.text(8, y - 5, f"{low * 10**decade:g}")
    x = float(LEFT + GAP / 2)
    for cell in cells:
        for index, each in enumerate(cell.compared):
            tall = height(each.ttft_mean_s.mean)
            page.box(x, TOP + PLOT - tall, BAR - 2, tall, COLOURS[index % len(COLOURS)])
            top, bottom = height(each.ttft_mean_s.high), height(each.ttft_mean_s.low)
            page.box(x + BAR / 2 - 2, TOP + PLOT - top, 2, max(1.0, top - bottom), AXIS)
            x += BAR
        start = x - BAR * len(cell.compared)
        load = "" if cell.plan.load is None else f" {cell.plan.load:.0%}"
        page.text(start, TOP + PLOT + 8, f"{cell.plan.name[:12]}{load}")
        x += GAP
    page.box(LEFT, TOP + PLOT, width - LEFT - RIGHT, 1, AXIS)
    _legend(page, cells, width)


def _columns(width: int) -> int:
    return max(1, (width - LEFT) // LEGEND_COLUMN)


def _legend(page: Page, cells: Sequence[Cell], width: int) -> None:
    names = [each.policy for each in cells[0].compared] if cells else []
    for index, name in enumerate(names):
        row, column = divmod(index, _columns(width))
        x, y = LEFT + column * LEGEND_COLUMN, TOP + PLOT + BOTTOM + row * LEGEND_ROW - 8
        page.box(x, y, 10, 10, COLOURS[index % len(COLOURS)])
        page.text(x + 16, y, name)
