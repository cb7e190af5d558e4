"""`macfabric scenario`: run scenarios, and check, show and list their files."""

import argparse
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from router.cli.confirmation import add_confirmation
from router.cli.endpoint import add_fabric_options
from router.cli.errors import CommandError, LocatedError
from router.cli.output import print_table
from router.cli.scenario.runs import run_cancel, run_run, run_runs
from router.cli.terminal import print_json, print_line
from router.scenario.diagnostics import ScenarioError
from router.scenario.reader import json_schema
from router.scenario.scenario import Scenario
from router.scenario.source import read_scenario_file, shipped_scenario, shipped_titles

_WHAT = "a scenario file, or the name of a shipped scenario"


def add_scenario(commands: Any) -> None:
    """Declare the commands."""
    scenario = commands.add_parser(
        "scenario",
    )
    verbs = scenario.add_subparsers(metavar="VERB")
    run = verbs.add_parser(
        "run",
        help="run a scenario in the fabric's router and follow it",
        description="Run a scenario, a file or the name of a shipped one, in the fabric's router "
        "and follow it to its end. The run continues if this command is interrupted; the same "
        "--run follows it again, or resumes it if it failed or was cancelled. Exit status 1 if an "
        "expectation does not hold.",
    )
    run.add_argument("what", metavar="FILE|NAME", help=_WHAT)
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=TEXT", help="set a variable"
    )
    run.add_argument("--as", dest="namespace", default="", metavar="NAME",
                     help="use separate agents for this series of runs")  # fmt: skip
    run.add_argument(
        "--run", dest="run_name", metavar="RUN", help="the run's name (default: date and time)"
    )
    run.add_argument(
        "--model", metavar="MODEL", help="a model that the fabric serves (default: its first)"
    )
    run.add_argument("--cold", action="store_true",
                     help="also run without a cache, and compare")  # fmt: skip
    run.add_argument("--repeat", type=int, default=1, metavar="N",
                     help="run N times, each with erased agents")  # fmt: skip
    run.add_argument("--transcript", action="store_true", help="also print what agents said")
    run.set_defaults(run=run_run)
    add_fabric_options(run)
    for name, about, command in (
        ("check", "list the errors in a file", run_check),
        ("show", "show who speaks in each phase, and who hears it", run_show),
    ):
        verb = verbs.add_parser(name, help=about)
        verb.add_argument("what", metavar="FILE|NAME", help=_WHAT)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=command)
    runs = verbs.add_parser("runs", help="list the router's runs")
    runs.set_defaults(run=run_runs)
    cancel = verbs.add_parser(
        "cancel",
        help="cancel a run, or delete one that has ended",
        description="Cancel a run, which `scenario run --run RUN` resumes; or delete one that has "
        "ended, with its transcript, which cannot be undone: on a terminal it asks first.",
    )
    cancel.add_argument("id", metavar="RUN", help="as `scenario runs` lists it")
    add_confirmation(cancel)
    cancel.set_defaults(run=run_cancel)
    for parser in (runs, cancel):
        add_fabric_options(parser)
    listing = verbs.add_parser("list", help="list the shipped scenarios")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)
    schema = verbs.add_parser("schema", help="print the JSON schema for editors")
    schema.add_argument("--json", action="store_true", help="accepted; the output is always JSON")
    schema.set_defaults(run=run_schema)


def run_check(arguments: argparse.Namespace) -> int:
    """Check a file; print its errors or a summary."""
    scenario = _read(arguments.what)
    turns = sum(len(list(phase.turns)) for phase in scenario.phases)
    row = {"scenario": scenario.name, "phases": len(scenario.phases), "turns": turns,
           "agents": len(scenario.agents)}  # fmt: skip
    if arguments.json:
        print_json(row)
    else:
        print_line(f"{scenario.name}: {turns} turns in {len(scenario.phases)} phases, no errors")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print a scenario's phases."""
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
    titles = shipped_titles()
    if arguments.json:
        print_json({"data": [{"name": name, "title": title} for name, title in titles.items()]})
    else:
        print_table("scenarios", ("name", "title"), titles.items())
    return 0


def run_schema(_: argparse.Namespace) -> int:
    """Print the JSON schema of scenario files."""
    print_json(json_schema())
    return 0


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
