"""Reports of benchmarks, for people and for programs."""

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric import __version__
from fabric.hosting.chip import chip_name
from router.cli.output import Steps, print_pairs, print_table

if TYPE_CHECKING:
    from node.mlx.backend import Backend

SCHEMA = 2  # of the document that `--json` prints

# Standard output is for the report; progress goes to standard error.
say = Steps().say


def open_directly(request: urllib.request.Request | str, timeout_s: float) -> HTTPResponse:
    """Send a request to a fabric on this machine, bypassing proxies."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer: HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure and the bound that it must meet."""

    statement: str
    figure: float
    bound: float
    is_least: bool  # True: the figure must reach the bound; False: it must not exceed it

    @property
    def met(self) -> bool:
        """Whether the figure meets the bound; NaN meets none."""
        return self.figure >= self.bound if self.is_least else self.figure <= self.bound


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a logarithmic axis; each point is `(x, y, low, high)`."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark; figures may be tables: {row: {column: number or text}}."""

    parameters: Mapping[str, Any]
    figures: Mapping[str, Any]
    ratios: Mapping[str, float]
    limits: tuple[Limit, ...]
    notes: tuple[str, ...] = field(default=())  # limitations of the figures
    is_judged: bool = True  # against the limits; a run of seconds is not
    charts: tuple[Chart, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether every limit is met; None without limits."""
        return all(limit.met for limit in self.limits) if self.is_judged else None


def environment() -> dict[str, Any]:
    """Return the environment on which figures depend, without dates and paths."""
    preloaded = (Path(path).name for path in os.environ.get("LD_PRELOAD", "").split(":"))
    return {
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "backend": _backend().name,
        "blas": [name for name in preloaded if "blas" in name.lower()],
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": _cores(),
        "python": platform.python_version(),
        "version": __version__,
        "commit": _commit(),
    }


def _processor() -> str:
    """Return the processor's model, or the architecture if unknown."""
    return chip_name() or platform.machine()


def _commit() -> str:
    """Return the checkout's commit, with a plus sign if files differ from it; empty outside git."""
    found = _output(["git", "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return f"{found}+" if changed else found


def _output(command: list[str]) -> str:
    try:
        ran = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ran.stdout.strip()


def is_gpu() -> bool:
    """Return whether models compute on a GPU, whose work is in no process's CPU time."""
    return _backend().is_gpu


def _backend() -> "Backend":
    from node.mlx import backend  # loads MLX, which --help does not need

    return backend.current()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_record(name: str, report: Report, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the report of `macfabric bench NAME OPTIONS` as the document that `--json` prints."""
    return {
        "schema": SCHEMA,
        "name": name,
        "command": shlex.join(["macfabric", "bench", name, *map(_shown, options)]),
        "environment": environment(),
        "parameters": dict(report.parameters),
        "figures": dict(report.figures),
        "ratios": dict(report.ratios),
        "limits": [
            {
                "statement": limit.statement,
                # JSON has no NaN.
                "figure": limit.figure if math.isfinite(limit.figure) else None,
                "bound": limit.bound,
                "is_least": limit.is_least,
                "met": limit.met if report.is_judged else None,
            }
            for limit in report.limits
        ],
        "notes": list(report.notes),
        "met": report.met,
        "charts": [asdict(chart) for chart in report.charts],
    }


def _shown(option: str) -> str:
    """Return an option without the folders of a path, which differ between machines."""
    return Path(option).name if option.startswith("/") else option


def show(name: str, report: Report) -> None:
    """Print the report for people."""
    record = as_record(name, report)
    flat = _flat({key: record[key] for key in ("environment", "parameters")})
    print_pairs((key.partition(".")[2], value) for key, value in flat)
    for key, value in _tables(report.figures):
        columns = list(dict.fromkeys(column for row in value.values() for column in row))
        rows = [[row, *(_text(cells.get(c, "")) for c in columns)] for row, cells in value.items()]
        print()
        print_table(key, [key, *columns], rows)
    tables = {key for key, _ in _tables(report.figures)}
    plain = {key: value for key, value in report.figures.items() if key not in tables}
    print()
    print_pairs((key, _text(value)) for key, value in _flat({**plain, **report.ratios}))
    print()
    for limit in report.limits:
        verdict = ("met   " if limit.met else "MISSED") if report.is_judged else "limit "
        sign = "≥" if limit.is_least else "≤"
        print(f"{verdict}  {limit.statement}: {_text(limit.figure)} {sign} {_text(limit.bound)}")
    for note in report.notes:
        print(f"note    {note}")


def print_record(record: Mapping[str, Any]) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(record, indent=2, ensure_ascii=False))


def _tables(figures: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    for key, value in figures.items():
        if isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values()):
            yield key, value


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
