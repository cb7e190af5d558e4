"""`macfabric serve`: the router and one node per Mac on a Ray cluster that runs already."""

import argparse
import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from router.cli.config_file import read_settings
from router.cli.errors import MISUSED, CommandError
from router.cli.folder import DataFolder, default_data_dir
from router.cli.output import Steps
from router.cli.supervisor import Plan, Supervisor
from router.cli.up import catch_signals, own_key, tell_ready
from router.keeper import Keeper

START_TIMEOUT_S = math.inf  # Macs may come in the evening


def add_serve(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        help="serve on a Ray cluster that runs already (what cluster.yaml does on its head)",
        description="Put a node on every Mac that is or comes into the Ray cluster, and run the "
        "router. Ray is neither started nor stopped; SIGTERM makes the nodes save everything and "
        "leaves them running.",
    )
    parser.add_argument("--address", default="auto", help="Ray's head as HOST:PORT, or auto")
    parser.add_argument("--config", type=Path, metavar="FILE", help="cluster.yaml to read")
    parser.add_argument("--data", type=Path, metavar="DIR", help="data (default: ~/.macfabric)")
    parser.add_argument("--host", help="address of the HTTP API")
    parser.add_argument("--port", type=int, help="its port")
    parser.add_argument("--json", action="store_true", help="say `ready` as one JSON line")
    parser.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until told to end."""
    try:
        settings = read_settings(arguments.config)
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    folder = DataFolder((arguments.data or default_data_dir(settings)).expanduser())
    folder.create()
    steps, ends = Steps(), catch_signals()
    router = replace(
        settings.router,
        host=settings.router.host if arguments.host is None else arguments.host,
        port=settings.router.port if arguments.port is None else arguments.port,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.claimed())
        keeper = Keeper(folder.log("keeper"))
        stack.callback(folder.forget_run)
        stack.callback(keeper.close)
        plan = Plan(
            folder,
            arguments.config,
            arguments.address,
            dict(os.environ) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            router.host,
            router.port,
            nodes_expected=0,
            at_exit="flush",
            start_timeout_s=START_TIMEOUT_S,
            key=own_key(router),
            restarts_max=None,
        )
        supervisor = Supervisor(plan, keeper, None, steps.say, lambda: bool(ends))
        stack.callback(supervisor.stop, hurry=lambda: len(ends) > 1)
        if supervisor.start():
            tell_ready(supervisor, settings.model, as_json=arguments.json)
            supervisor.run()
    steps.say("stopped; the nodes keep running")
    return 0
