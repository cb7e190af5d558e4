"""`macfabric drain` and `undrain`: empty a node of its agents, or let it take agents again."""

import argparse
import time
from typing import Any

from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import FAILED, INTERRUPTED, CommandError
from router.cli.node_report import DRAINED
from router.cli.output import (
    Steps,
    human_bytes,
    human_seconds,
    print_answer,
    print_pairs,
    print_table,
)
from router.cli.terminal import print_error, print_json, print_line
from router.client.client import Fabric

POLL_S = 0.5


def add_drain(commands: Any) -> None:
    """Declare the commands."""
    drain = commands.add_parser(
        "drain",
        description="Stop a node from taking new agents and move its own to others, fastest "
        "first. Exit status 0 when none is left. Ctrl-C stops watching, not the drain; "
        "`macfabric undrain NODE` ends it, and undoes it except for the moves.",
    )
    drain.add_argument("--no-wait", action="store_true", help="begin, and do not watch")
    drain.add_argument("--timeout", type=float, metavar="S", help="stop watching after S seconds")
    drain.set_defaults(run=run_drain)
    undrain = commands.add_parser(
        "undrain",
        description="Let a node take agents again. Agents that were moved off stay where they are. "
        "`macfabric drain NODE` undoes it.",
    )
    undrain.set_defaults(run=run_undrain)
    for parser in (drain, undrain):
        parser.add_argument("node", metavar="NODE", help="as `macfabric nodes` lists it")
        add_fabric_options(parser)


def run_drain(arguments: argparse.Namespace) -> int:
    """Drain a node and watch; exit status 1 while agents are left on it."""
    fabric, node = fabric_of(arguments), arguments.node
    drain = fabric.drain(node)
    if not arguments.no_wait:
        try:
            drain = _watch(fabric, node, drain, arguments)
        except KeyboardInterrupt:
            message = f"the drain continues; `macfabric undrain {node}` ends it"
            raise CommandError(message, INTERRUPTED) from None
    if arguments.json:
        print_json(drain)
    else:
        _print_drain(drain)
    return 0 if arguments.no_wait or drain.get("state") == DRAINED else FAILED


def run_undrain(arguments: argparse.Namespace) -> int:
    """Let a node take agents again."""
    answer = fabric_of(arguments).undrain(arguments.node)
    pairs = [(name, answer.get(name)) for name in ("node", "state")]
    return print_answer(answer, pairs, as_json=arguments.json)


def _watch(
    fabric: Fabric, node: str, drain: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Report progress until the drain has ended, or the time is up."""
    steps, reported = Steps(quiet=arguments.json), ""
    while True:
        text = (
            f"{drain.get('agents_moved')} moved, {drain.get('agents_left')} left, "
            f"{human_bytes(drain.get('bytes_sent'))} sent"
        )
        if text != reported:
            steps.say(reported := text)
        is_over = arguments.timeout is not None and steps.seconds >= arguments.timeout
        if drain.get("state") != "draining" or is_over:
            return drain
        time.sleep(POLL_S)
        row = next((row for row in fabric.nodes() if row.get("name") == node), {})
        if row.get("drain") is None:
            message = f"the drain of {node} was ended by `undrain`"
            raise CommandError(message)
        drain = row["drain"]


def _print_drain(drain: dict[str, Any]) -> None:
    moved = f"{drain.get('agents_moved')} agents, {human_bytes(drain.get('bytes_sent'))}"
    print_pairs(
        [
            ("node", drain.get("node")),
            ("state", drain.get("state")),
            ("moved", moved),
            ("left", drain.get("agents_left")),
            ("time", human_seconds(drain.get("seconds"))),
        ]
    )
    if drain.get("state") == DRAINED:
        print_line(f"{drain.get('node')} has no agents left: you can close its lid")
    stuck = drain.get("stuck") or ()
    if stuck:
        rows = ((row.get("id"), row.get("message")) for row in stuck)
        print_table("Not moved", ("agent", "why"), rows)
    if drain.get("stuck_others"):
        count = drain["stuck_others"]
        print_error(f"warning: {count} more, of other tenants or not listed")
