"""`macfabric serve`: run the router, and a node per Mac, on an existing Ray cluster."""

import argparse
import contextlib
import math
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from fabric.keys import AUTHORITY_CERTIFICATE, CLUSTER_KEY
from fabric.limits import NODES_MAX
from router.cli.config_file import nodes_expected, read_settings
from router.cli.config_show import plain_rows
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.errors import MISUSED, CommandError
from router.cli.model_choice import require_on_every_mac
from router.cli.output import Steps
from router.cli.supervisor import Plan, Supervisor
from router.cli.up import catch_signals, own_certificate, own_subject, print_ready
from router.supervise.keeper import Keeper

START_TIMEOUT_S = math.inf  # Macs may join hours later
RAY_TIMEOUT_S = 300.0  # until a Ray cluster must answer
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "RAY_ENABLE_AUTO_CONNECT": "0",  # as in `ray_environment`
}


def add_serve(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        description="Start a node on every Mac that is in the Ray cluster or joins it, and run the "
        "router. Ray is neither started nor stopped; SIGTERM makes the nodes save everything and "
        "leaves them running.",
    )
    parser.add_argument("--address", default="auto", help="Ray's head as HOST:PORT, or auto")
    parser.add_argument("--config", type=Path, metavar="FILE", help="cluster.yaml to read")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    parser.add_argument("--host", help="address of the HTTP API")
    parser.add_argument("--port", type=int, help="port of the HTTP API")
    parser.add_argument(
        "--expect",
        type=int,
        metavar="N",
        help="number of nodes to expect: until all have joined, the router reports no agent as "
        "unknown (default: router.nodes_expected of FILE, else its head and workers)",
    )
    parser.add_argument("--json", action="store_true", help="print the `ready` line as JSON")
    parser.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    try:
        settings = read_settings(arguments.config)
        expected = arguments.expect
        if expected is None:
            expected = nodes_expected(arguments.config, settings)
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    if not 0 <= expected <= NODES_MAX:
        message = f"--expect must be 0 to {NODES_MAX}"
        raise CommandError(message, MISUSED)
    require_on_every_mac(settings.model, "macfabric.model")
    folder = DataFolder((arguments.data or default_data_dir(settings)).expanduser())
    os.umask(0o077)
    folder.create()
    steps, ends = Steps(), catch_signals()
    router = replace(
        settings.router,
        host=settings.router.host if arguments.host is None else arguments.host,
        port=settings.router.port if arguments.port is None else arguments.port,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.claimed())
        folder.stop_request.unlink(missing_ok=True)
        in_force = replace(settings, router=router)
        folder.write_setting_rows(plain_rows(in_force, "serve", arguments))
        keys = Path(settings.keys_dir or folder.path).expanduser()
        if settings.keys_dir:
            _require_same_key(folder, keys)
        else:
            for change in folder.keys.create(own_subject(router), datetime.now(UTC)):
                steps.say(change)
        keeper = Keeper(folder.log("keeper"))
        stack.callback(folder.forget_run)
        stack.callback(keeper.close)
        plan = Plan(
            folder,
            arguments.config,
            arguments.address,
            dict(os.environ) | ENVIRONMENT,
            router.host,
            router.port,
            nodes_expected=0,
            at_exit="flush",
            start_timeout_s=START_TIMEOUT_S,
            ray_timeout_s=RAY_TIMEOUT_S,
            operator_key=folder.renew_operator_key(),
            waits_indefinitely=True,
            trusted=keys / AUTHORITY_CERTIFICATE,
            certificate=own_certificate(router),
            stop_wait_s=router.stop_wait_s,
            nodes_to_come=expected,
        )
        supervisor = Supervisor(plan, keeper, None, steps.say, lambda: bool(ends))
        stack.callback(supervisor.stop, hurry=lambda: len(ends) > 1)
        if supervisor.start():
            print_ready(supervisor, settings.model, as_json=arguments.json)
            supervisor.run()
        has_served = "ready" in supervisor.phases
    if not has_served:
        message = "stopped before the router was ready"
        raise CommandError(message)
    steps.say("stopped; the nodes keep running")
    return 0


def _require_same_key(folder: DataFolder, keys: Path) -> None:
    """Raise CommandError if caches are stored under another key, which would lose them."""
    earlier, shipped = folder.path / CLUSTER_KEY, keys / CLUSTER_KEY
    if earlier.exists() and shipped.exists() and earlier.read_text() != shipped.read_text():
        message = (
            f"The stored caches were written under the key {earlier}, which is not {shipped}. "
            "To keep them, replace the shipped key with that one on the machine where you run "
            f"`ray up`, and run it again; to give them up, remove {earlier}."
        )
        raise CommandError(message)
