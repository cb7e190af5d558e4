"""Commands that change an agent: migrate, pin, erase."""

import argparse
from typing import Any

from router.cli.endpoint import agent_path
from router.cli.errors import FAILED
from router.cli.output import human_bytes, human_seconds, print_answer, print_pairs, print_table
from router.cli.queries import add_agent_id, add_common, endpoint_of
from router.cli.terminal import print_json, print_line

MIGRATE_TIMEOUT_S = 600.0  # a large agent over Wi-Fi


def add_verbs(commands: Any) -> None:
    """Declare the commands."""
    migrate = commands.add_parser("migrate", help="move an agent to another node")
    add_agent_id(migrate)
    migrate.add_argument("--to", required=True, metavar="NODE", help="where it should live")
    migrate.set_defaults(run=run_migrate)
    pin = commands.add_parser("pin", help="make an agent the last to be evicted")
    add_agent_id(pin)
    pin.add_argument("--off", action="store_true", help="evict it like any other again")
    pin.set_defaults(run=run_pin)
    erase = commands.add_parser(
        "erase",
        help="remove every byte of an agent, everywhere",
        description="Remove every byte of an agent, on every node, and print a receipt. This "
        "cannot be undone: to keep a copy, run `macfabric hibernate ID FILE` first.",
    )
    add_agent_id(erase)
    erase.add_argument(
        "--runs",
        action="store_true",
        help="remove the ended runs of scenarios that it took part in as well: they quote it",
    )
    erase.set_defaults(run=run_erase)
    for parser in (migrate, pin, erase):
        add_common(parser)


def run_migrate(arguments: argparse.Namespace) -> int:
    """Move an agent and say what it took."""
    path = agent_path(arguments.id, "migrate")
    moved = endpoint_of(arguments).call(
        "POST", path, {"to": arguments.to}, timeout_s=MIGRATE_TIMEOUT_S
    )
    paused = human_seconds(moved.get("pause_seconds"))
    return print_answer(
        moved,
        [
            ("agent", arguments.id),
            ("from", moved.get("from")),
            ("to", moved.get("to")),
            ("epoch", moved.get("epoch")),
            ("blocks", f"{moved.get('blocks_sent')} sent, {moved.get('blocks_reused')} there"),
            ("bytes", human_bytes(moved.get("bytes_sent"))),
            ("time", f"{human_seconds(moved.get('seconds'))}, of which paused {paused}"),
        ],
        as_json=arguments.json,
    )


def run_pin(arguments: argparse.Namespace) -> int:
    """Pin or unpin an agent and say whether the pin counts."""
    body = {"pinned": not arguments.off}
    answer = endpoint_of(arguments).call("POST", agent_path(arguments.id, "pin"), body)
    if not answer.get("pinned"):
        said = "not pinned"
    elif answer.get("pin_held"):
        said = "pinned"
    else:
        said = "pinned, without effect: the pins of this tenant are over their part of the disk"
    pairs = [("agent", arguments.id), ("node", answer.get("node")), ("pin", said)]
    return print_answer(answer, pairs, as_json=arguments.json)


def _has_removed_record(part: dict[str, Any]) -> bool:
    others = part.get("other_models") or {}
    return any((part.get("record_removed"), part.get("quarantined_removed"), others.get("records")))


def run_erase(arguments: argparse.Namespace) -> int:
    """Erase an agent and print the receipt; exit status 1 while a node still owes its part."""
    path = agent_path(arguments.id) + ("?runs=true" if arguments.runs else "")
    receipt = endpoint_of(arguments).call("DELETE", path)
    if arguments.json:
        print_json(receipt)
        return 0 if receipt.get("deleted") else FAILED
    removed = f"{receipt.get('blocks_removed')} blocks, {human_bytes(receipt.get('bytes_removed'))}"
    pairs = [("agent", receipt.get("id")), ("removed", removed)]
    if receipt.get("derived_agents"):
        tokens, agents = receipt.get("derived_tokens"), receipt.get("derived_agents")
        pairs.append(("borrowed", f"{tokens} tokens of {agents} other agents dropped"))
    print_pairs(pairs)
    columns = ("node", "record", "blocks", "bytes", "blocks kept for other agents")
    print_table(
        "Receipt",
        columns,
        (
            (
                part.get("node"),
                "removed" if _has_removed_record(part) else "none",
                part.get("blocks_removed"),
                human_bytes(part.get("bytes_removed")),
                part.get("blocks_kept_shared"),
            )
            for part in receipt.get("receipts", ())
        ),
    )
    for name in receipt.get("removed_runs", ()):
        print_line(f"run {name}, which quoted it, is removed")
    for name in receipt.get("quoting_runs", ()):
        print_line(f"warning: run {name} still quotes it; DELETE /v1/scenarios/{name} removes that")
    for node in receipt.get("unreachable", ()):
        print_line(f"warning: {node} is away; it erases its part when it is back")
    if receipt.get("remembered") == []:
        print_line("warning: no node's disk took the note that this was erased; repeat it later")
    return 0 if receipt.get("deleted") else FAILED
