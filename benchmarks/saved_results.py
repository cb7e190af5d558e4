"""Results in a folder: each as JSON, as a Markdown page and, if it has charts, as PNG."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import papers
from benchmarks.report import say

_WIDTH, _HEIGHT, _DPI = 7.0, 4.5, 110
_HIDDEN_OPTIONS = ("--json", "--keep", "--report")


def options_shown(argv: Sequence[str]) -> list[str]:
    """Return the options that affect the measurement."""
    shown: list[str] = []
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name not in _HIDDEN_OPTIONS:
            shown.append(word)
        elif name != "--json" and not value:
            next(words, None)
    return shown


def save(record: Mapping[str, Any], folder: Path) -> None:
    """Write a result, and its page and charts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['name']}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    render(record, folder)
    say(f"written to {path}")


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a folder by name."""
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return {each["name"]: each for each in documents if "schema" in each}


def render_all(folder: Path) -> list[str]:
    """Render the results of a folder, and the papers' tables beside them; return their names."""
    results = results_of(folder)
    for record in results.values():
        render(record, folder)
    (folder / "papers.md").write_text(papers.page(results), encoding="utf-8")
    return list(results)


def render(record: Mapping[str, Any], folder: Path) -> None:
    """Write a result's page and its charts."""
    images = [
        _draw(chart, folder / f"{record['name']}-{number}.png")
        for number, chart in enumerate(record["charts"], start=1)
    ]
    page = "\n".join(_page(record, images)) + "\n"
    (folder / f"{record['name']}.md").write_text(page, encoding="utf-8")


def _page(record: Mapping[str, Any], images: Iterable[Path]) -> Iterable[str]:
    yield f"# {record['name']}"
    yield ""
    yield f"    {record['command']}"
    yield ""
    environment = {key: value for key, value in record["environment"].items() if value}
    yield from _table(("", "value"), _pairs({**environment, **record["parameters"]}))
    for name, value in record["figures"].items():
        if _is_table(value):
            columns = list(dict.fromkeys(column for row in value.values() for column in row))
            rows = ([row, *(cells.get(c, "") for c in columns)] for row, cells in value.items())
            yield from ("", f"## {name}")
            yield from _table((name, *columns), rows)
    plain = {name: value for name, value in record["figures"].items() if not _is_table(value)}
    if plain or record["ratios"]:
        yield from ("", "## Figures")
        yield from _table(("", "value"), _pairs({**plain, **record["ratios"]}))
    for image in images:
        yield from ("", f"![{image.stem}]({image.name})")
    if record["limits"]:
        yield from ("", "## Limits")
        rows = (
            [e["statement"], e["figure"], f"{'≥' if e['is_least'] else '≤'} {_text(e['bound'])}",
             {True: "met", False: "**missed**", None: "not judged"}[e["met"]]]
            for e in record["limits"]
        )  # fmt: skip
        yield from _table(("limit", "measured", "bound", ""), rows)
    if record["notes"]:
        yield ""
        yield from (f"- {note}" for note in record["notes"])


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())


def _pairs(values: Mapping[str, Any], before: str = "") -> Iterable[list[Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{before}{key}: ")
        else:
            yield [f"{before}{key}", value]


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(_text(value).replace('|', '/') for value in row)} |"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _draw(chart: Mapping[str, Any], path: Path) -> Path:
    from matplotlib.figure import Figure  # takes a second to load, and only charts need it

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for name, points in chart["lines"].items():
        x, y, low, high = (list(values) for values in zip(*points, strict=True))
        below = [each - least for each, least in zip(y, low, strict=True)]
        above = [most - each for each, most in zip(y, high, strict=True)]
        axes.errorbar(x, y, yerr=[below, above], label=name, marker="o", markersize=4, capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(chart["x_label"])
    axes.set_ylabel(chart["y_label"])
    axes.set_title(chart["title"])
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Software": None})
    return path
