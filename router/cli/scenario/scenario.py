"""`macfabric scenario`: perform scenarios on a fabric, check them, show those that there are."""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fabric.errors import ConflictError, FabricError
from router.cli.data_folder import default_data_dir
from router.cli.endpoint import Endpoint
from router.cli.errors import FAILED, INTERRUPTED, MISUSED, CommandError, LocatedError
from router.cli.output import print_table
from router.cli.queries import add_common, endpoint_of
from router.cli.scenario.agent_lease import AgentLease
from router.cli.scenario.http_speaker import HttpSpeaker
from router.cli.scenario.progress import RunProgress
from router.cli.scenario.remote import add_remote, fresh_run_name, run_remote
from router.cli.scenario.report import (
    print_report,
    print_savings,
    print_transcripts,
    print_unmet,
)
from router.cli.terminal import print_json, print_line
from router.scenario.complaints import ScenarioError
from router.scenario.folder import read_scenario_file
from router.scenario.outcome import failed_verdicts, outcome_row, series_savings
from router.scenario.reader import json_schema
from router.scenario.report import rows
from router.scenario.run_events import Lasting, RunEvent
from router.scenario.run_state import RunState
from router.scenario.scenario import Scenario
from router.scenario.series import Arm, Series, SeriesPlan
from router.scenario.shipped import shipped_file, shipped_names, shipped_scenario
from router.scenario.variables import with_variables

_WHAT = "a scenario file, or the name of a shipped scenario"


_NOT_BEGUN = ("other_run", "run_in_progress")  # there is nothing to go on with


def add_scenario(commands: Any) -> None:
    """Declare the commands."""
    scenario = commands.add_parser(
        "scenario",
        help="perform agents' scenarios: run, check, list, show, schema, runs, cancel",
    )
    verbs = scenario.add_subparsers(metavar="VERB", required=True)
    run = verbs.add_parser(
        "run",
        help="perform a scenario on a fabric",
        description="Perform a scenario: a file, or the name of a shipped one. What was said is "
        "written down as it is said; the same --run again goes on where it broke off. Exit status "
        "1 where an expectation does not hold.",
    )
    run.add_argument("what", metavar="FILE|NAME", help=_WHAT)
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=TEXT", help="set a variable"
    )
    run.add_argument("--as", dest="namespace", default="", metavar="NAME",
                     help="keep this series' agents apart from others'")  # fmt: skip
    run.add_argument(
        "--run", dest="run_name", metavar="NAME", help="the run's name (default: the time)"
    )
    run.add_argument("--model", help="a model that the fabric serves (default: its first)")
    run.add_argument("--cold", action="store_true",
                     help="once more with agents erased before each phase; compare")  # fmt: skip
    run.add_argument("--repeat", type=int, default=1, metavar="N",
                     help="so often, each time from nothing (default: %(default)s)")  # fmt: skip
    run.add_argument("--journals", type=Path, metavar="DIR", help="where runs are written down")
    run.add_argument("--remote", action="store_true",
                     help="in the router, which goes on with it alone; follow it")  # fmt: skip
    run.add_argument("--transcript", action="store_true", help="print what was said, too")
    run.set_defaults(run=run_run)
    add_common(run)
    for name, about, command in (
        ("check", "say what is wrong with a file", run_check),
        ("show", "say who speaks when, and who hears it", run_show),
    ):
        verb = verbs.add_parser(name, help=about)
        verb.add_argument("what", metavar="FILE|NAME", help=_WHAT)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=command)
    add_remote(verbs)
    listing = verbs.add_parser("list", help="list the shipped scenarios")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)
    schema = verbs.add_parser("schema", help="print the JSON schema for editors")
    schema.add_argument("--json", action="store_true", help="it is JSON in any case")
    schema.set_defaults(run=run_schema)


def run_check(arguments: argparse.Namespace) -> int:
    """Read a file; say what is wrong with it, or that nothing is."""
    scenario = _read(arguments.what)
    turns = sum(len(list(phase.turns)) for phase in scenario.phases)
    row = {"scenario": scenario.name, "phases": len(scenario.phases), "turns": turns,
           "agents": len(scenario.agents)}  # fmt: skip
    if arguments.json:
        print_json(row)
    else:
        print_line(
            f"{scenario.name}: {turns} turns in {len(scenario.phases)} phases, nothing is wrong"
        )
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Show a scenario's phases."""
    scenario = _read(arguments.what)
    shown = [
        {
            "phase": phase.id,
            "title": phase.title or phase.id,
            "speak": list(phase.agents),
            "hear": sorted(phase.listeners),
            "turns": len(list(phase.turns)),
            "order": phase.order.value,
            "expectations": len(phase.expect),
        }
        for phase in scenario.phases
    ]
    if arguments.json:
        print_json({"scenario": scenario.name, "phases": shown})
        return 0
    cells = [
        (r["phase"], r["turns"], r["order"], ", ".join(r["speak"]), ", ".join(r["hear"]) or "-")  # type: ignore[arg-type]
        for r in shown
    ]
    print_table(
        scenario.title or scenario.name, ("phase", "turns", "order", "speak", "hear"), cells
    )
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """List the shipped scenarios."""
    found = {name: shipped_scenario(name).title or "" for name in shipped_names()}
    if arguments.json:
        print_json({"data": [{"name": name, "title": title} for name, title in found.items()]})
    else:
        print_table("scenarios", ("name", "title"), found.items())
    return 0


def run_schema(_: argparse.Namespace) -> int:
    """Print the schema."""
    print_json(json_schema())
    return 0


# --- run ---------------------------------------------------------------------------------------


def run_run(arguments: argparse.Namespace) -> int:
    """Perform a scenario, as often and in as many arms as is asked for."""
    if arguments.repeat < 1:
        message = "--repeat is at least 1"
        raise CommandError(message, MISUSED)
    chosen = _chosen(arguments.set)
    if arguments.remote:
        return run_remote(arguments, chosen)
    scenario = _with_set(_read(arguments.what), chosen)
    endpoint = endpoint_of(arguments)
    plan = SeriesPlan(
        scenario,
        arguments.run_name or fresh_run_name(),
        _digest_of(arguments.what, scenario),
        arguments.namespace,
        arguments.repeat,
        arguments.cold,
    )

    @contextmanager
    def watch(
        arm: Arm, state: RunState, _: Sequence[Lasting]
    ) -> Iterator[Callable[[RunEvent], None]]:
        lease.take(plan.used_ids(arm))
        title = f"{plan.name_of(arm)} {arm.kind}"
        progress = RunProgress(plan.turns, len(state.said), title, is_quiet=arguments.json)
        with progress as tell:

            def guarded(event: RunEvent) -> None:
                lease.require()
                tell(event)

            yield guarded

    speaker = HttpSpeaker(endpoint, arguments.model or _first_model(endpoint))
    journals = _journals(arguments)
    lease = AgentLease(endpoint, plan.name, plan.journal(journals, plan.arms[0]))
    series = Series(plan, speaker, journals, watch)
    try:
        asyncio.run(series.perform())
    except ConflictError as error:
        if error.code not in _NOT_BEGUN:
            raise
        message = f"{error.message} (--run NAME)" if error.code == "other_run" else error.message
        raise CommandError(message) from None
    except FabricError as error:
        message = f"the run broke off: {error.message}. Go on with --run {plan.name}."
        raise CommandError(message) from None
    except KeyboardInterrupt:
        message = f"stopped. Go on with --run {plan.name}."
        raise CommandError(message, INTERRUPTED) from None
    finally:
        lease.release()
    return _told(series, arguments)


def _told(series: Series, arguments: argparse.Namespace) -> int:
    """Tell what came of it; return the exit status."""
    plan, performed = series.plan, series.performed
    failed = failed_verdicts(performed)
    outcome = outcome_row(performed)
    if arguments.json:
        head = {"scenario": plan.scenario.name, "run": plan.name}
        print_json(head | outcome | {"holds": not failed})
    else:
        if arguments.transcript:
            print_transcripts(outcome["runs"])
        for each in performed:
            title = f"{plan.name}, {each.arm.kind} {each.arm.number}"
            print_report(title, rows(each.run.state))
        print_savings(list(series_savings(performed)))
        print_unmet(outcome["runs"])
        print_line(
            "all expectations hold" if not failed else f"{len(failed)} expectations do not hold"
        )
    return FAILED if failed else 0


# --- what is performed, and where --------------------------------------------------------------


def _read(what: str) -> Scenario:
    path = Path(what)
    try:
        if path.suffix or path.exists():
            return read_scenario_file(path)
        return shipped_scenario(what)
    except ScenarioError as error:
        raise LocatedError(error.message) from None
    except FabricError as error:
        raise CommandError(error.message) from None


def _chosen(items: Sequence[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    if not all(equals for _, equals, _ in pairs):
        message = "--set expects NAME=TEXT"
        raise CommandError(message, MISUSED)
    return {name: text for name, _, text in pairs}


def _with_set(scenario: Scenario, chosen: Mapping[str, str]) -> Scenario:
    try:
        return with_variables(scenario, chosen)
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None


def _first_model(endpoint: Endpoint) -> str:
    listed = endpoint.get("/v1/models").get("data") or []
    if not listed:
        message = f"{endpoint.url} serves no model yet"
        raise CommandError(message)
    return str(listed[0]["id"])


def _journals(arguments: argparse.Namespace) -> Path:
    base = arguments.journals or (arguments.data or default_data_dir()).expanduser() / "scenarios"
    return Path(base)


def _digest_of(what: str, scenario: Scenario) -> str:
    """Digest all that a run is made of: a journal fits no other."""
    path = Path(what)
    raw = (path if path.suffix or path.exists() else shipped_file(what)).read_bytes()
    made = blake2b(raw, digest_size=16)
    made.update(repr(scenario).encode())  # with its variables, and the texts of its files
    return made.hexdigest()
