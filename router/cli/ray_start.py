"""`macfabric ray start`: start Ray on one Mac of a cluster file; cluster.yaml runs it."""

import argparse
import os
from pathlib import Path
from typing import Any

from router.cli.errors import FAILED, MISUSED, CommandError
from router.cli.terminal import print_json
from router.supervise.ray_member import shipped_member


def add_ray_start(commands: Any) -> None:
    """Declare the command."""
    ray = commands.add_parser("ray")
    start = ray.add_subparsers(metavar="COMMAND").add_parser(
        "start",
        help="start Ray from ~/macfabric, and on the head the router",
        description="Start Ray from ~/macfabric as `ray up` does on each Mac of cluster.yaml. On "
        "the head, start the router as well, and leave both running if their code, cluster file "
        "and keys are unchanged. In all other cases, stop every Ray on this Mac first.",
    )
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="start the head and the router")
    role.add_argument("--address", metavar="HOST:PORT", help="join the head at this address")
    start.add_argument(
        "--autoscaling-config", type=Path, metavar="FILE", help="the head's copy of cluster.yaml"
    )
    start.add_argument("--json", action="store_true", help="print the result as JSON")
    start.set_defaults(run=run_ray_start)


def run_ray_start(arguments: argparse.Namespace) -> int:
    """Start Ray on this Mac."""
    os.umask(0o077)
    member = shipped_member()
    if not arguments.head:
        is_started = member.start_worker(arguments.address)
    elif arguments.autoscaling_config is None:
        message = "--head needs --autoscaling-config FILE"
        raise CommandError(message, MISUSED)
    else:
        is_started = member.start_head(arguments.autoscaling_config.expanduser())
    if arguments.json:
        print_json({"started": is_started})
    return 0 if is_started else FAILED
