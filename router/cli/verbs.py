"""Commands that change an agent: migrate, erase."""

import argparse
from typing import Any

from router.cli.endpoint import agent_path
from router.cli.output import human_bytes, print_json, print_pairs
from router.cli.queries import add_common, endpoint_of

MIGRATE_TIMEOUT_S = 600.0  # a large agent over Wi-Fi


def add_verbs(commands: Any) -> None:
    """Declare the commands."""
    migrate = commands.add_parser("migrate", help="move an agent to another node")
    migrate.add_argument("id", metavar="ID")
    migrate.add_argument("--to", required=True, metavar="NODE", help="where it should live")
    migrate.set_defaults(run=run_migrate)
    erase = commands.add_parser("erase", help="remove every byte of an agent, everywhere")
    erase.add_argument("id", metavar="ID")
    erase.set_defaults(run=run_erase)
    for parser in (migrate, erase):
        add_common(parser)


def run_migrate(arguments: argparse.Namespace) -> int:
    """Move an agent and say what it took."""
    path = agent_path(arguments.id, "migrate")
    moved = endpoint_of(arguments).call(
        "POST", path, {"to": arguments.to}, timeout_s=MIGRATE_TIMEOUT_S
    )
    if arguments.json:
        print_json(moved)
        return 0
    print_pairs(
        [
            ("agent", arguments.id),
            ("from", moved.get("from")),
            ("to", moved.get("to")),
            ("epoch", moved.get("epoch")),
            ("blocks", f"{moved.get('blocks_sent')} sent, {moved.get('blocks_reused')} there"),
            ("bytes", human_bytes(moved.get("bytes_sent"))),
            ("seconds", f"{moved.get('seconds')}, of which paused {moved.get('pause_seconds')}"),
        ]
    )
    return 0


def run_erase(arguments: argparse.Namespace) -> int:
    """Erase an agent and print the receipt."""
    receipt = endpoint_of(arguments).call("DELETE", agent_path(arguments.id))
    if arguments.json:
        print_json(receipt)
        return 0
    print_pairs(receipt.items())
    return 0
