"""`macfabric scenario run`, `runs` and `cancel`: runs that the router performs."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from secrets import token_hex
from typing import Any, Self
from urllib.parse import quote

from fabric.codec import from_plain
from fabric.errors import FabricError
from router.cli.confirmation import confirm_loss
from router.cli.endpoint import fabric_of
from router.cli.errors import FAILED, INTERRUPTED, MISUSED, CommandError, LocatedError
from router.cli.output import print_answer, print_table
from router.cli.scenario.progress import RunProgress
from router.cli.scenario.report import (
    print_report,
    print_savings,
    print_transcripts,
    print_unmet,
)
from router.cli.terminal import print_json, print_line
from router.client.client import Fabric
from router.client.http_api import BrokenOffError, ClientError, ServerEvent
from router.scenario.diagnostics import ScenarioError
from router.scenario.event_rows import read_event
from router.scenario.report import ReportRow, Saving
from router.scenario.run_events import RunEvent
from router.scenario.source import file_source

PATH = "/v1/scenarios"
RECONNECT_S = 1.0
RECONNECT_TRIES = 60  # while a router restarts
_ENDED, _RUNNING = "ended", "running"


def run_runs(arguments: argparse.Namespace) -> int:
    """List the tenant's runs."""
    rows = fabric_of(arguments).rows(PATH)
    if arguments.json:
        print_json({"data": rows})
        return 0
    cells = (
        (r["id"], r["scenario"], r["state"], f"{r['turns']['done']}/{r['turns']['total']}",
         {True: "yes", False: "no"}.get(r["holds"], "-"))
        for r in rows
    )  # fmt: skip
    print_table("runs", ("id", "scenario", "state", "turns", "holds"), cells)
    return 0


def run_cancel(arguments: argparse.Namespace) -> int:
    """Cancel a running run, or delete a finished one."""
    fabric, path = fabric_of(arguments), _path(arguments.id)
    if fabric.get(path).get("state") != _RUNNING:
        confirm_loss(f"delete run {arguments.id} and its files", is_confirmed=arguments.yes)
    answer = fabric.call("DELETE", path)
    result = "deleted, with all its files" if answer.get("deleted") else "cancelled, and kept"
    return print_answer(answer, [(arguments.id, result)], as_json=arguments.json)


def run_run(arguments: argparse.Namespace) -> int:
    """Start or resume a run in the router and follow it to its end."""
    if arguments.repeat < 1:
        message = "--repeat must be at least 1"
        raise CommandError(message, MISUSED)
    body = _source_fields(arguments.what, _variables(arguments.set)) | {
        "as": arguments.namespace or None,
        "run": arguments.run_name or _new_run_name(),
        "model": arguments.model,
        "cold": arguments.cold,
        "repeat": arguments.repeat,
    }
    fabric = fabric_of(arguments)
    started = fabric.call("POST", PATH, body)
    name = str(started["id"])
    try:
        _show_progress(fabric, started, is_quiet=arguments.json)
    except KeyboardInterrupt:
        message = (
            f"run {name} continues in the router. Follow it again with --run {name}, "
            f"or cancel it with `macfabric scenario cancel {name}`."
        )
        raise CommandError(message, INTERRUPTED) from None
    outcome = fabric.get(_path(name))
    if arguments.json:
        print_json(outcome)
    else:
        if arguments.transcript:
            print_transcripts(outcome["runs"])
        _print_outcome(outcome)
    return 0 if outcome.get("holds") else FAILED


def _new_run_name() -> str:
    """Return a name made of the time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"


def _variables(items: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    if not all(equals for _, equals, _ in pairs):
        message = "--set expects NAME=TEXT"
        raise CommandError(message, MISUSED)
    return {name: text for name, _, text in pairs}


def _source_fields(what: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return the request's fields that say what to run; check a file before it is sent."""
    path = Path(what)
    if not (path.suffix or path.exists()):
        return {"scenario": what, "set": variables}
    try:
        script = file_source(path, variables)
        script.read()
    except ScenarioError as error:
        raise LocatedError(error.message) from None
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    return {"yaml": script.yaml, "files": script.files, "set": variables}


def _show_progress(fabric: Fabric, started: Mapping[str, Any], *, is_quiet: bool) -> None:
    """Show a run's events until it ends, with one bar for each arm."""
    turns_total = int(started["turns"]["total"])
    with _Bars(str(started["id"]), is_quiet=is_quiet) as bars:
        for event in _run_events(fabric, str(started["id"])):
            if event.name == "run.began":
                turns_total = int(event.data.get("arm_turns") or turns_total)
            elif event.name == "arm.began":
                bars.begin(event.data, turns_total)
            else:
                run_event = read_event(event.name, event.data.get("event") or {})
                if run_event is not None:
                    bars.show(run_event)


def _run_events(fabric: Fabric, name: str) -> Iterator[ServerEvent]:
    """Yield a run's events until it ends; reconnect where the stream breaks off."""
    after, tries = None, 0
    while True:
        try:
            for event in fabric.events(_path(name) + "?stream=true", after):
                after, tries = event.id or after, 0
                yield event
                if event.name == "run.ended":
                    return
        except BrokenOffError:
            pass
        except ClientError:
            if after is None or tries == RECONNECT_TRIES:
                raise
        tries += 1
        if tries > RECONNECT_TRIES:
            message = (
                f"{fabric.url} closed the stream {tries} times in a row; the run may continue "
                f"there. Follow it again with --run {name}."
            )
            raise CommandError(message)
        time.sleep(RECONNECT_S)


class _Bars:
    """Progress bar of the current arm."""

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._name = name
        self._is_quiet = is_quiet
        self._bar: AbstractContextManager[Any] = nullcontext()
        self.show: Callable[[RunEvent], None] = lambda _: None

    def begin(self, arm: Mapping[str, Any], turns_total: int) -> None:
        """Replace the bar by one for another arm; its earlier events follow."""
        self.__exit__()
        title = f"{self._name} {arm.get('arm')} {arm.get('number')}"
        self._bar = RunProgress(turns_total, title, is_quiet=self._is_quiet)
        self.show = self._bar.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__(None, None, None)


def _print_outcome(outcome: Mapping[str, Any]) -> None:
    """Print a run's tables and its end; raise CommandError where it did not finish."""
    name = outcome["id"]
    for run in outcome["runs"]:
        rows = [{k: v for k, v in row.items() if k != "cached_share"} for row in run["report"]]
        report: list[ReportRow] = [from_plain(ReportRow, row) for row in rows]
        print_report(f"{name}, {run['arm']} {run['number']}", report)
    print_savings([from_plain(Saving, saving) for saving in outcome["savings"]])
    unmet_count = print_unmet(outcome["runs"])
    if outcome["state"] != _ENDED:
        error = outcome.get("error") or {}
        reason = f": {error['message']}" if error else ""
        verb = {"cancelled": "was cancelled"}.get(outcome["state"], outcome["state"])
        message = f"run {name} {verb}{reason}. Resume it with --run {name}."
        raise CommandError(message)
    print_line(f"unmet expectations: {unmet_count}" if unmet_count else "all expectations hold")


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"
