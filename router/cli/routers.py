"""`macfabric router`, `voter` and `promote`: a standby router, and votes for routers."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fabric.errors import FabricError
from fabric.keys import CLUSTER_FILE_KEYS, CLUSTER_KEY, SHIPPED_KEYS
from fabric.settings import RouterSettings
from router.cli.child import run_module
from router.cli.config_file import nodes_expected, read_settings
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.output import print_pairs
from router.cli.terminal import print_error, print_json
from router.listener import EVERY_ADDRESS, IPV4_LOOPBACK
from router.private_files import write_private

VOTER_PORT: Final = 8010


def add_routers(commands: Any) -> None:
    """Declare the commands."""
    router = commands.add_parser(
        "router",
        description="Run a router without nodes on an existing Ray cluster. It takes over within "
        "5 seconds if the active one dies, freezes or is cut off; until then it forwards requests. "
        "All routers read the same FILE, with router.standby: true.",
    )
    router.add_argument(
        "--standby",
        action="store_true",
        help="let another router become active first, if both start together",
    )
    router.add_argument("--address", default="auto", help="Ray's head as HOST:PORT, or auto")
    router.add_argument("--config", type=Path, metavar="FILE", help="cluster.yaml to read")
    router.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    router.add_argument("--host", help="address of the HTTP API")
    router.add_argument("--port", type=int, help="port of the HTTP API")
    router.add_argument("--expect", type=int, metavar="N", help="number of nodes of the fabric")
    router.set_defaults(run=run_router)
    voter = commands.add_parser(
        "voter",
        description="Grant terms to routers, and do nothing else. Any machine that is mostly on "
        "will do. List its URL in router.voters of the file that all routers read.",
    )
    voter.add_argument("--keys", type=Path, metavar="DIR", help="the fabric's keys")
    voter.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    voter.add_argument("--host", default="0.0.0.0", help="address to listen at")  # noqa: S104
    voter.add_argument("--port", type=int, default=VOTER_PORT, help=f"default: {VOTER_PORT}")
    voter.set_defaults(run=run_voter)
    for parser in (router, voter):
        parser.add_argument(
            "--json", action="store_true", help="accepted; the output is always JSON"
        )
    promote = commands.add_parser(
        "promote",
        description="Make the router at --url the active one with the votes of the nodes that "
        "answer. Only do this when the other router is off: two routers that are cut off from each "
        "other could both change the fabric. To undo it, promote the other router.",
    )
    add_fabric_options(promote)
    promote.set_defaults(run=run_promote)


def run_router(arguments: argparse.Namespace) -> int:
    """Run a router in the foreground; return its exit status."""
    try:
        settings = read_settings(arguments.config)
        expected = arguments.expect or nodes_expected(arguments.config, settings)
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    if not settings.router.standby:
        message = (
            "a second router needs `router.standby: true` in the file that all routers of the "
            "fabric read (see docs/standby.md)"
        )
        raise CommandError(message, MISUSED)
    folder = DataFolder((arguments.data or default_data_dir(settings)).expanduser())
    folder.create()
    folder.renew_operator_key()
    _note_endpoint(folder, settings.router, arguments)
    argv = ["--data-dir", str(folder.path), "--ray-address", arguments.address]
    argv += ["--expect", str(expected)]
    argv += ["--config", str(arguments.config)] if arguments.config else []
    argv += ["--host", arguments.host] if arguments.host else []
    argv += ["--port", str(arguments.port)] if arguments.port is not None else []
    argv += ["--standby"] if arguments.standby else []
    return run_module("router", argv)


def _note_endpoint(
    folder: DataFolder, router: RouterSettings, arguments: argparse.Namespace
) -> None:
    """Let the commands on this machine find the router."""
    port = router.port if arguments.port is None else arguments.port
    chosen = replace(router, host=arguments.host or router.host)
    host = IPV4_LOOPBACK if chosen.host in EVERY_ADDRESS else chosen.host
    if port:
        url = f"{'https' if chosen.uses_tls else 'http'}://{host}:{port}"
        record = {"url": url, "pid": os.getpid()}
        if router.tls.certificate:
            record["certificate"] = str(Path(router.tls.certificate).expanduser())
        write_private(folder.endpoint, json.dumps(record))


def run_voter(arguments: argparse.Namespace) -> int:
    """Run a voter in the foreground; return its exit status."""
    data = (arguments.data or default_data_dir()).expanduser()
    argv = ["--data-dir", str(data), "--keys", str(_keys(arguments.keys, data))]
    argv += ["--host", arguments.host, "--port", str(arguments.port)]
    return run_module("router.voter", argv)


def _keys(chosen: Path | None, data: Path) -> Path:
    """Return the folder of the fabric's keys; raise CommandError if there is none."""
    folders = [chosen] if chosen else [data, Path(SHIPPED_KEYS), Path(CLUSTER_FILE_KEYS)]
    for folder in folders:
        if (folder.expanduser() / CLUSTER_KEY).exists():
            return folder.expanduser()
    message = (
        "there are no keys of a fabric here: copy the folder that `macfabric certs create` made "
        "for this machine, and name it with --keys"
    )
    raise CommandError(message, MISUSED)


def run_promote(arguments: argparse.Namespace) -> int:
    """Promote a router; print its role."""
    row = fabric_of(arguments).promote()
    if arguments.json:
        print_json(row)
        return 0
    print_pairs([(name, row.get(name)) for name in ("role", "term", "url")])
    if row.get("promoted"):
        print_error("warning: it has fewer voters than needed; start no other router by hand")
    return 0
