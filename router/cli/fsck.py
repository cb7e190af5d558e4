"""`macfabric fsck`: check and repair the stored agents in this machine's data folder.

Only the node package can read the files, so the check is a separate program.
"""

import argparse
from pathlib import Path
from typing import Any

from fabric.keys import CLUSTER_KEY, SHIPPED_KEYS
from router.cli.child import run_module
from router.cli.data_folder import default_data_dir

MODULE = "node.fsck.run"


def add_fsck(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "fsck",
        description=(
            "Read every record and block of this machine's stopped nodes, and report damage. "
            "Nothing is changed without --repair. A repair cannot be undone: what it cuts from "
            "records is computed again. Exit status 0: sound; 1: problems found or, with --repair, "
            "left; 2: used wrongly, or a node is running on the folder."
        ),
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help=f"where cluster.key is (default: DIR, then {SHIPPED_KEYS})",
    )
    parser.add_argument("--node", metavar="NODE", help="check one node (default: all)")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="quarantine damaged blocks, cut records to what is left, remove unused files",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_fsck)


def run_fsck(arguments: argparse.Namespace) -> int:
    """Run the check as a child process; return its exit status."""
    data = (arguments.data or default_data_dir()).expanduser()
    keys = arguments.keys or (
        data if (data / CLUSTER_KEY).exists() else Path(SHIPPED_KEYS).expanduser()
    )
    argv = [f"--data={data}", f"--keys={keys}"]
    argv += [f"--node={arguments.node}"] if arguments.node is not None else []
    argv += ["--repair"] if arguments.repair else []
    argv += ["--json"] if arguments.json else []
    return run_module(MODULE, argv)
