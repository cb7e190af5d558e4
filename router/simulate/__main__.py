"""`python -m router.simulate`: the program behind `macfabric simulate`."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fabric.errors import FabricError, RejectedError
from fabric.shown_text import escape_line
from router.simulate import report
from router.simulate.catalog import (
    COMPARED,
    TUNED,
    WORKLOADS,
    find_policy,
    find_workload,
    policy_names,
)
from router.simulate.chart import draw, require_drawing
from router.simulate.faults import parse_factors, parse_fault, require_nodes
from router.simulate.fleet_file import FleetModel, read_fleet, shipped_names
from router.simulate.request import SimulateRequest
from router.simulate.run import Conditions
from router.simulate.study import Cell, CellPlan, Study, plan_trace, plan_workload
from router.simulate.traces import read_trace

PROGRESS_S = 1.0  # between two lines
LOAD = 0.75  # of the fleet's capacity, by default


def main() -> int:
    """Run the study that the first argument describes as JSON; return the exit status."""
    request = SimulateRequest.of(json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    try:
        if request.listing:
            _list(request)
        else:
            _simulate(request)
        sys.stdout.flush()
    except FabricError as error:
        sys.stderr.write(f"macfabric: {escape_line(error.message)}\n")
        return 1
    except OSError as error:
        is_output = error.filename is None
        if is_output:
            # Python's own exit would fail on what is still buffered: it goes into a pipe instead.
            os.dup2(os.pipe()[1], sys.stdout.fileno())
        where = "cannot write to standard output" if is_output else str(error.filename)
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"macfabric: {escape_line(where)}: {error.strerror}\n")
        return 1
    return 0


def _simulate(request: SimulateRequest) -> None:
    if request.html is not None or request.png is not None:
        require_drawing()
    study = _study(request)
    plans = list(_plans(request, study.fleet))
    progress = _Progress(study, plans)
    cells = [study.cell(plan, progress.note) for plan in plans]
    progress.close()
    if request.json:
        plain = study.as_json(cells) | {"command": request.command()}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    else:
        _print_table(report.COLUMNS, [row for cell in cells for row in report.rows_of(cell)])
        _print_overall(cells)
    if request.html is not None:
        page = report.html(study, cells, request.command())
        Path(request.html).write_text(page, encoding="utf-8")
    if request.png is not None:
        Path(request.png).write_bytes(draw(cells, "png"))


def _study(request: SimulateRequest) -> Study:
    fleet = read_fleet(request.fleet)
    if request.link_mbit is not None:
        fleet = fleet.with_link_mbit(request.link_mbit)
    policies = tuple(dict.fromkeys(request.policies)) or COMPARED
    for name in policies:
        if name != TUNED:
            find_policy(name)
    faults = tuple(parse_fault(text) for text in request.faults)
    require_nodes(faults, (node.name for node in fleet.each()))
    wrong = parse_factors(request.wrong_speeds) if request.wrong_speeds is not None else None
    seeds = tuple(range(request.first_seed, request.first_seed + request.seeds))
    return Study(fleet, policies, seeds, Conditions(faults, wrong, request.slow_links))


def _plans(request: SimulateRequest, fleet: FleetModel) -> Iterator[CellPlan]:
    if request.trace is not None:
        if request.workloads or request.loads or request.sessions:
            message = "a trace has its own turns: leave out workloads, --load and --sessions"
            raise RejectedError(message, code="invalid_request")
        path = Path(request.trace)
        yield plan_trace(path.stem, read_trace(path), request.speedup)
        return
    for name in request.workloads or tuple(WORKLOADS):
        for load in request.loads or (LOAD,):
            workload = find_workload(name)
            sessions = request.sessions or max(1, round(request.size * workload.sessions))
            yield plan_workload(workload, fleet, load, sessions)


def _list(request: SimulateRequest) -> None:
    listed = {
        "workloads": {workload.name: workload.title for workload in WORKLOADS.values()},
        "fleets": {name: f"{read_fleet(name).count} nodes" for name in shipped_names()},
        "policies": dict.fromkeys(policy_names(), ""),
    }
    if request.json:
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
        return
    for title, names in listed.items():
        sys.stdout.write(f"{title}:\n")
        for name, text in names.items():
            sys.stdout.write(f"  {name.ljust(20)} {text}".rstrip() + "\n")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [[escape_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def _print_overall(cells: Sequence[Cell]) -> None:
    sys.stdout.write(f"\nover all cells, relative to {cells[0].reference} (below 1 is faster):\n")
    _print_table(("policy", "mean", "p95"), report.summary_rows(cells))
    for cell in cells:
        if cell.plan.measured_ttft_s is not None:
            text = f"{cell.plan.name}: the log's own mean is {cell.plan.measured_ttft_s:.2f} s"
            sys.stdout.write(escape_line(text) + "\n")
        for each in cell.compared:
            if each.note:
                sys.stdout.write(escape_line(f"{cell.plan.name}: {each.note}") + "\n")


class _Progress:
    """Lines on standard error, at most one a second."""

    def __init__(self, study: Study, plans: Sequence[CellPlan]) -> None:
        self._began_s = self._last_s = time.monotonic()
        self._runs = len(plans) * len(study.run_policies()) * len(study.seeds)
        self._seen: set[tuple[str, float | None, str, int]] = set()
        self._is_terminal = sys.stderr.isatty()
        self._turns = 0
        self._of_run = 0

    def note(self, plan: CellPlan, policy: str, seed: int, turns: int, now_s: float) -> None:
        """Show where a run is."""
        run = (plan.name, plan.load, policy, seed)
        if run not in self._seen:
            self._seen.add(run)
            self._of_run = 0
        self._turns += turns - self._of_run
        self._of_run = turns
        moment_s = time.monotonic()
        if moment_s - self._last_s < PROGRESS_S:
            return
        self._last_s = moment_s
        load = "" if plan.load is None else f" at {plan.load:.0%}"
        rate = self._turns / (moment_s - self._began_s)
        line = escape_line(
            f"run {len(self._seen)} of {self._runs}: {plan.name}{load}, {policy}, seed {seed}: "
            f"{turns} of about {plan.turns_expected} turns, {now_s:.0f} s; {rate:.0f} turns/s"
        )
        ending = f"\r{line}\x1b[K" if self._is_terminal else f"{line}\n"
        sys.stderr.write(ending)
        sys.stderr.flush()

    def close(self) -> None:
        """Write what the study has cost."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        cpu_s = time.process_time()
        sys.stderr.write(f"{clear}{self._turns} turns in {cpu_s:.1f} s of CPU time\n")


if __name__ == "__main__":
    logging.getLogger("macfabric").setLevel(logging.ERROR)  # every takeover would be a warning
    sys.exit(main())
