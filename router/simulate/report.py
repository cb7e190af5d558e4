"""Reports of a study: a table for terminals, and one HTML file with everything in it."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from fabric.units import format_bytes
from router.simulate.chart import draw
from router.simulate.statistics import Interval
from router.simulate.study import Cell, Compared, Study, overall

COLUMNS: Final = (
    *("workload", "load", "policy", "mean s", "95 %", "p95 s", "95 %"),
    *("mean ÷ ref", "95 %", "turn s", "cached", "elsewhere", "moves", "moved"),
)
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;"
    "color:#222;background:#fff}table{border-collapse:collapse;width:100%;font-size:13px}"
    "td,th{padding:.2rem .5rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}tr.best td{font-weight:600}"
)


def rows_of(cell: Cell) -> list[tuple[str, ...]]:
    """Return a cell's rows of the table."""
    load = "" if cell.plan.load is None else f"{cell.plan.load:.0%}"
    return [(cell.plan.name, load, *_figures(each)) for each in cell.compared]


def _figures(each: Compared) -> tuple[str, ...]:
    count = len(each.outcomes)
    moves = sum(outcome.moves for outcome in each.outcomes) / count
    moved_bytes = sum(outcome.moved_bytes for outcome in each.outcomes) / count
    turn_s = sum(outcome.turn_mean_s for outcome in each.outcomes) / count
    cached = sum(outcome.cached_share for outcome in each.outcomes) / count
    elsewhere = sum(outcome.relocated_share for outcome in each.outcomes) / count
    return (
        each.policy,
        f"{each.ttft_mean_s.mean:.2f}",
        _ends(each.ttft_mean_s),
        f"{each.ttft_p95_s.mean:.2f}",
        _ends(each.ttft_p95_s),
        f"{each.mean_ratio.mean:.2f}",
        _ends(each.mean_ratio),
        f"{turn_s:.2f}",
        f"{cached:.3f}",
        f"{elsewhere:.1%}",
        f"{moves:.0f}",
        format_bytes(moved_bytes),
    )


def _ends(each: Interval) -> str:
    return f"{max(0.0, each.low):.2f}-{each.high:.2f}"


def summary_rows(cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """Return each policy's geometric means over all cells, relative to the reference."""
    return [(policy, f"{mean:.2f}", f"{p95:.2f}") for policy, (mean, p95) in overall(cells).items()]


def html(study: Study, cells: Sequence[Cell], command: str) -> str:
    """Return a page that needs no other file and no network."""
    chart = draw(cells, "svg").decode()
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Simulation: {escape(study.fleet.name)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>Simulation of {escape(study.fleet.name)}</h1>",
            *_conditions(study, command),
            chart[chart.index("<svg") :],
            *_notes(cells),
            "<h2>All cells</h2>",
            *_table(COLUMNS, [row for cell in cells for row in rows_of(cell)], _best_of(cells)),
            "<h2>Over all cells</h2>",
            "<p>Geometric means of the ratios to the reference; below 1 is faster.</p>",
            *_table(("policy", "mean", "p95"), summary_rows(cells), set()),
            "</body></html>\n",
        )
    )


def _conditions(study: Study, command: str) -> Iterator[str]:
    conditions, seeds = study.conditions, len(study.seeds)
    yield f"<p>{study.fleet.count} nodes, {seeds} seeds, the same arrivals for every policy.</p>"
    yield f"<p><code>{escape(command)}</code></p>"
    for fault in conditions.faults:
        lasts = "" if fault.lasts_s is None else f" for {fault.lasts_s:g} s"
        yield f"<p>Fault: {fault.kind} {escape(fault.node)} at {fault.at_s:g} s{lasts}.</p>"
    if conditions.wrong_speeds is not None:
        low, high = conditions.wrong_speeds
        yield f"<p>Nodes report speeds that are wrong by a factor of {low:g}-{high:g}.</p>"
    if conditions.slow_links != 1.0:
        yield f"<p>Transfers take {conditions.slow_links:g} times as long.</p>"


def _notes(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        for each in cell.compared:
            if each.note:
                where = f"{cell.plan.name}, {each.policy}"
                yield f"<p>{escape(where)}: {escape(each.note)}.</p>"


def _best_of(cells: Sequence[Cell]) -> set[int]:
    """Return the numbers of the rows with the lowest mean of their cells."""
    best: set[int] = set()
    start = 0
    for cell in cells:
        means = [each.ttft_mean_s.mean for each in cell.compared]
        best.add(start + means.index(min(means)))
        start += len(means)
    return best


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], best: set[int]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(each)}</th>" for each in columns) + "</tr>"
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(each)}</td>" for each in row)
        yield f'<tr class="best">{cells}</tr>' if number in best else f"<tr>{cells}</tr>"
    yield "</table>"
