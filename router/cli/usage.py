"""`macfabric usage`: what tenants' turns used, by day or hour."""

import argparse
import time
from typing import Any

from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.output import human_count, human_seconds, print_pairs, print_table
from router.cli.terminal import print_json

_FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:00"}


def add_usage(commands: Any) -> None:
    """Declare the command."""
    usage = commands.add_parser(
        "usage",
        help="show what tenants' turns used",
        description="Show the tokens that each tenant's turns computed, reused and answered, and "
        "the time that reuse saved, by day or hour (UTC), the newest first. A tenant's key shows "
        "its own and its limits; an operator's key, which the fabric's data folder has, shows all "
        "tenants. Changes nothing.",
    )
    usage.add_argument(
        "--period", choices=tuple(_FORMATS), default="day", help="sum by day (default) or by hour"
    )
    usage.add_argument("--tenant", metavar="NAME", help="for operators: only this tenant")
    usage.add_argument("--limit", type=int, metavar="N", help="list at most N rows")
    usage.set_defaults(run=run_usage)
    add_fabric_options(usage)


def run_usage(arguments: argparse.Namespace) -> int:
    """Print usage."""
    named = {name: getattr(arguments, name) for name in ("period", "tenant", "limit")}
    answer = fabric_of(arguments).usage(
        **{name: str(value) for name, value in named.items() if value is not None}
    )
    if arguments.json:
        print_json(answer)
        return 0
    columns = (
        *("period", "tenant", "turns", "broken", "refused", "prompt", "cached", "computed"),
        *("answered", "compute time", "saved time"),
    )
    print_table("Usage (UTC)", columns, (_row(row) for row in answer.get("data", [])))
    limits = answer.get("limits") or {}
    pairs = [(name.replace("_", " "), human_count(value)) for name, value in limits.items()]
    if any(limits.get(name) is not None for name in ("turns", "tokens_per_minute")):
        print_pairs([("limits", ""), *pairs])
    return 0


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    start = time.gmtime(row.get("start_s") or 0)
    counters = (
        *("turns", "broken_turns", "refused_turns", "prompt_tokens", "cached_tokens"),
        *("computed_tokens", "completion_tokens"),
    )
    return (
        time.strftime(_FORMATS.get(str(row.get("period")), _FORMATS["hour"]), start),
        row.get("tenant"),
        *(human_count(row.get(name)) for name in counters),
        human_seconds(row.get("compute_s")),
        human_seconds(row.get("saved_s")),
    )
