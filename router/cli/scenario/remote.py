"""`macfabric scenario run --remote`, `runs` and `cancel`: runs that the router performs."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from fabric.codec import from_plain
from fabric.errors import FabricError
from router.cli.endpoint import Endpoint
from router.cli.errors import FAILED, INTERRUPTED, CommandError
from router.cli.event_stream import BrokenOffError, ToldEvent, follow_events
from router.cli.output import print_answer, print_table
from router.cli.queries import add_common, endpoint_of, rows_of
from router.cli.scenario.progress import RunProgress
from router.cli.scenario.report import (
    print_report,
    print_savings,
    print_transcripts,
    print_unmet,
)
from router.cli.terminal import print_json, print_line
from router.scenario.event_rows import read_event
from router.scenario.report import ReportRow, Saving
from router.scenario.run_events import RunEvent
from router.scenario.script import script_file

PATH = "/v1/scenarios"
AGAIN_S = 1.0
TRIES = 60  # of a router that is restarted meanwhile


def add_remote(verbs: Any) -> None:
    """Declare the commands."""
    runs = verbs.add_parser("runs", help="list the runs in the router, those of `run --remote`")
    runs.set_defaults(run=run_runs)
    cancel = verbs.add_parser(
        "cancel", help="end a run in the router; of one that has ended, remove all it wrote"
    )
    cancel.add_argument("id", metavar="ID", help="as `scenario runs` lists it")
    cancel.set_defaults(run=run_cancel)
    for parser in (runs, cancel):
        add_common(parser)


def run_runs(arguments: argparse.Namespace) -> int:
    """List runs."""
    rows = rows_of(endpoint_of(arguments).get(PATH))
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
    """Cancel a run, or forget it."""
    told = endpoint_of(arguments).call("DELETE", _path(arguments.id))
    what = "gone, with all that it wrote" if told.get("deleted") else "cancelled, and kept"
    return print_answer(told, [(arguments.id, what)], as_json=arguments.json)


def run_remote(arguments: argparse.Namespace, chosen: dict[str, str]) -> int:
    """Have the router perform a scenario, and follow it; exit status 1 where it does not hold."""
    endpoint = endpoint_of(arguments)
    body = _what(arguments.what) | {
        "set": chosen,
        "as": arguments.namespace or None,
        "run": arguments.run_name or fresh_run_name(),
        "model": arguments.model,
        "cold": arguments.cold,
        "repeat": arguments.repeat,
    }
    begun = endpoint.call("POST", PATH, body)
    name = str(begun["id"])
    try:
        _show(endpoint, begun, is_quiet=arguments.json)
    except KeyboardInterrupt:
        message = f"{name} goes on in the router; `macfabric scenario cancel {name}` ends it."
        raise CommandError(message, INTERRUPTED) from None
    shown = endpoint.get(_path(name))
    if arguments.json:
        print_json(shown)
    else:
        if arguments.transcript:
            print_transcripts(shown["runs"])
        _tell(shown)
    return 0 if shown.get("holds") else FAILED


def fresh_run_name() -> str:
    """Name a run after the time; no other one of that second has the same name."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"


def _what(what: str) -> dict[str, Any]:
    path = Path(what)
    if not (path.suffix or path.exists()):
        return {"scenario": what}
    try:
        script = script_file(path, {})
    except FabricError as error:
        raise CommandError(error.message) from None
    return {"yaml": script.yaml, "files": script.files}


def _show(endpoint: Endpoint, begun: dict[str, Any], *, is_quiet: bool) -> None:
    """Show a run's progress to its end, one bar for each performance."""
    total = int(begun["turns"]["total"])
    arms = _Bars(str(begun["id"]), is_quiet=is_quiet)
    with arms:
        for told in _followed(endpoint, str(begun["id"])):
            if told.name == "run.began":
                total = int(told.data.get("arm_turns") or total)
            elif told.name == "arm.began":
                arms.begin(told.data, total)
            else:
                event = read_event(told.name, told.data.get("event") or {})
                if event is not None:
                    arms.tell(event)


def _followed(endpoint: Endpoint, name: str) -> Iterator[ToldEvent]:
    """Yield a run's events up to its end; go on where a stream breaks off."""
    after, tries = None, 0
    while True:
        try:
            for told in follow_events(endpoint, _path(name) + "?stream=true", after):
                after, tries = told.id or after, 0
                yield told
                if told.name == "run.ended":
                    return
        except BrokenOffError:
            pass
        except CommandError:
            if after is None or tries == TRIES:
                raise
        tries += 1
        if tries > TRIES:
            message = f"{endpoint.url} broke off again and again; {name} may go on there"
            raise CommandError(message)
        time.sleep(AGAIN_S)


class _Bars:
    """The bar of the performance that is told of."""

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._name = name
        self._is_quiet = is_quiet
        self._shown: AbstractContextManager[Any] = nullcontext()
        self.tell: Callable[[RunEvent], None] = _nothing

    def begin(self, row: dict[str, Any], turns_total: int) -> None:
        """Show another one; what was done before is told behind it."""
        self.__exit__()
        title = f"{self._name} {row.get('arm')} {row.get('number')}"
        self._shown = RunProgress(turns_total, 0, title, is_quiet=self._is_quiet)
        self.tell = self._shown.__enter__()

    def __enter__(self) -> None:
        self._shown.__enter__()

    def __exit__(self, *_: object) -> None:
        self._shown.__exit__(None, None, None)


def _nothing(_: RunEvent) -> None:
    """Tell nobody."""


def _tell(shown: dict[str, Any]) -> None:
    for run in shown["runs"]:
        rows = [{k: v for k, v in row.items() if k != "cached_share"} for row in run["report"]]
        found: list[ReportRow] = [from_plain(ReportRow, row) for row in rows]
        print_report(f"{shown['id']}, {run['arm']} {run['number']}", found)
    print_savings([from_plain(Saving, saving) for saving in shown["savings"]])
    print_unmet(shown["runs"])
    error = shown.get("error") or {}
    print_line(shown["state"] + (f": {error['message']}" if error else ""))


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"
