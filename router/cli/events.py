"""`macfabric events`: what happens in a fabric, one line per event, until Ctrl-C."""

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import CommandError
from router.cli.output import human_value
from router.cli.terminal import print_json, print_line
from router.client.http_api import ServerEvent

PATH = "/v1/events"
_FILTERS: Final = {
    "node": "show only events of this node",
    "agent": "show only events of this agent",
    "name": "show only events with this name or prefix, such as agent or move.state",
    "tenant": "for operators: show only this tenant's agents",
}


def add_events(commands: Any) -> None:
    """Declare the command."""
    events = commands.add_parser(
        "events",
        description="Print what happens in a fabric as it happens, after a summary of how it is, "
        "until Ctrl-C. A tenant's key shows its own agents, an operator's key everything. With "
        "--json, one JSON object per line: event, id and data (see docs/http-api.md, Events).",
    )
    for name, says in _FILTERS.items():
        events.add_argument(f"--{name}", metavar=name.upper(), help=says)
    events.add_argument("--limit", type=int, metavar="N", help="end after N events")
    events.add_argument(
        "--past", action="store_true", help="print the last events that are kept (512), and end"
    )
    add_fabric_options(events)
    events.set_defaults(run=run_events)


def run_events(arguments: argparse.Namespace) -> int:
    """Follow the events until Ctrl-C; exit status 1 if the fabric ends the stream."""
    fabric = fabric_of(arguments)
    try:
        for event in fabric.events(_path(arguments)):
            if arguments.json:
                print_json(_as_row(event), indent=None, flush=True)
            else:
                print_line(event_line(event.name, event.data), flush=True)
    except KeyboardInterrupt:
        return 0
    if arguments.limit is not None or arguments.past:
        return 0
    message = f"the router at {fabric.url} has stopped"
    raise CommandError(message)


def _path(arguments: argparse.Namespace) -> str:
    named = {name: getattr(arguments, name) for name in (*_FILTERS, "limit")}
    named["follow"] = "false" if arguments.past else None
    query = urlencode({name: value for name, value in named.items() if value is not None})
    return f"{PATH}?{query}" if query else PATH


def _as_row(event: ServerEvent) -> dict[str, Any]:
    return {"event": event.name, "id": event.id, "data": event.data}


def event_line(name: str, row: Mapping[str, Any]) -> str:
    """Write an event for people: its time, name and subject, then its other fields."""
    data = dict(row)
    at = datetime.fromtimestamp(data.pop("at_s"), UTC).astimezone() if "at_s" in data else None
    time = at.strftime("%H:%M:%S") if at else "now"
    if name == "snapshot":
        return f"{time:8}  {name:16}  {_summary(data)}"
    tenant = data.pop("tenant", None)
    subject = data.pop("id", None) or data.pop("node", "")
    rest = ", ".join(
        f"{each} {human_value(each, value)}" for each, value in data.items() if value is not None
    )
    owner = f" of {tenant}" if tenant else ""
    return f"{time:8}  {name:16}  {subject}{owner}  {rest}".rstrip()


def _summary(data: dict[str, Any]) -> str:
    nodes, agents = data.get("nodes") or [], len(data.get("agents") or [])
    ready = sum(node.get("state") == "ready" for node in nodes)
    agents += data.get("agents_left_out") or 0
    moves = len(data.get("moves") or [])
    health = (data.get("health") or {}).get("status")
    return f"{health}: {ready} of {len(nodes)} nodes ready, {agents} agents, {moves} moves"
