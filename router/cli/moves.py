"""Commands about where agents are: fork, replicate, prefetch, drain, undrain."""

import argparse
import time
from typing import Any
from urllib.parse import quote

from router.cli.endpoint import Endpoint, agent_path
from router.cli.errors import FAILED, INTERRUPTED, CommandError
from router.cli.output import (
    Steps,
    human_bytes,
    human_count,
    human_seconds,
    print_answer,
    print_pairs,
    print_table,
)
from router.cli.queries import add_agent_id, add_common, endpoint_of, rows_of
from router.cli.terminal import print_error, print_json

COPY_TIMEOUT_S = 3600.0  # a large agent over Wi-Fi
POLL_S = 0.5


def add_moves(commands: Any) -> None:
    """Declare the commands."""
    fork = commands.add_parser("fork", help="make a new agent with the context of another one")
    add_agent_id(fork)
    fork.add_argument("--as", dest="name", required=True, metavar="ID", help="its name")
    fork.add_argument("--to", metavar="NODE", help="where it lives (default: on the other's node)")
    fork.set_defaults(run=run_fork)
    replicate = commands.add_parser("replicate", help="keep a copy of an agent on another node")
    add_agent_id(replicate)
    replicate.add_argument("--to", required=True, metavar="NODE", help="the node that keeps it")
    replicate.add_argument("--once", action="store_true", help="copy now, and not after each turn")
    replicate.set_defaults(run=run_replicate)
    prefetch = commands.add_parser("prefetch", help="load an agent ahead of its turn")
    add_agent_id(prefetch)
    prefetch.add_argument("--to", metavar="NODE", help="bring a copy to this node's disk instead")
    prefetch.set_defaults(run=run_prefetch)
    drain = commands.add_parser(
        "drain",
        help="empty a node before its lid closes",
        description="Stop a node from taking new agents and move its own to others, fastest "
        "first. Exit status 0 when none is left. Ctrl-C stops watching, not the drain; "
        "`macfabric undrain NODE` ends it.",
    )
    drain.add_argument("--no-wait", action="store_true", help="begin, and do not watch")
    drain.add_argument("--timeout", type=float, metavar="S", help="stop watching after S seconds")
    drain.set_defaults(run=run_drain)
    undrain = commands.add_parser("undrain", help="let a node take agents again")
    undrain.set_defaults(run=run_undrain)
    for parser in (drain, undrain):
        parser.add_argument("node", metavar="NODE", help="as `macfabric nodes` lists it")
    for parser in (fork, replicate, prefetch, drain, undrain):
        add_common(parser)


def run_fork(arguments: argparse.Namespace) -> int:
    """Fork an agent and say where it lives."""
    body = {"as": arguments.name, "to": arguments.to}
    made = _post(arguments, "fork", body)
    lives = [("agent", made.get("id")), ("forked from", arguments.id), ("node", made.get("node"))]
    pairs = [*lives, ("tokens", human_count(made.get("tokens"))), *_cost(made)]
    return print_answer(made, pairs, as_json=arguments.json)


def run_replicate(arguments: argparse.Namespace) -> int:
    """Copy an agent and say what it took."""
    made = _post(arguments, "replicate", {"to": arguments.to, "keep": not arguments.once})
    return print_answer(made, _replica(made), as_json=arguments.json)


def run_prefetch(arguments: argparse.Namespace) -> int:
    """Load an agent and say where it is."""
    made = _post(arguments, "prefetch", {"to": arguments.to})
    if made.get("object") == "agent.replica":
        return print_answer(made, _replica(made), as_json=arguments.json)
    memory = human_bytes((made.get("bytes") or {}).get("hot"))
    tiers = ", ".join(made.get("tiers") or ())
    lives = [("agent", arguments.id), ("node", made.get("node")), ("in", tiers), ("memory", memory)]
    return print_answer(made, lives, as_json=arguments.json)


def run_drain(arguments: argparse.Namespace) -> int:
    """Drain a node and watch; exit status 1 while agents are left on it."""
    endpoint, node = endpoint_of(arguments), arguments.node
    drain = endpoint.call("POST", _node_path(node, "drain"))
    if not arguments.no_wait:
        try:
            drain = _watch(endpoint, node, drain, arguments)
        except KeyboardInterrupt:
            message = f"the drain goes on; `macfabric undrain {node}` ends it"
            raise CommandError(message, INTERRUPTED) from None
    if arguments.json:
        print_json(drain)
    else:
        _print_drain(drain)
    return 0 if arguments.no_wait or drain.get("state") == "drained" else FAILED


def run_undrain(arguments: argparse.Namespace) -> int:
    """Let a node take agents again."""
    answer = endpoint_of(arguments).call("POST", _node_path(arguments.node, "undrain"))
    pairs = [(name, answer.get(name)) for name in ("node", "state")]
    return print_answer(answer, pairs, as_json=arguments.json)


def _watch(
    endpoint: Endpoint, node: str, drain: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Report progress until the drain has ended, or the time is up."""
    steps, said = Steps(quiet=arguments.json), ""
    while True:
        text = (
            f"{drain.get('agents_moved')} moved, {drain.get('agents_left')} left, "
            f"{human_bytes(drain.get('bytes_sent'))} sent"
        )
        if text != said:
            steps.say(said := text)
        is_over = arguments.timeout is not None and steps.seconds >= arguments.timeout
        if drain.get("state") != "draining" or is_over:
            return drain
        time.sleep(POLL_S)
        rows = rows_of(endpoint.get("/v1/nodes"))
        found = next((row for row in rows if row.get("name") == node), {}).get("drain")
        if found is None:
            message = f"{node} is not being drained any more: somebody ended it"
            raise CommandError(message)
        drain = found


def _print_drain(drain: dict[str, Any]) -> None:
    print_pairs(
        [
            ("node", drain.get("node")),
            ("state", drain.get("state")),
            (
                "moved",
                f"{drain.get('agents_moved')} agents, {human_bytes(drain.get('bytes_sent'))}",
            ),
            ("left", drain.get("agents_left")),
            ("time", human_seconds(drain.get("seconds"))),
        ]
    )
    stuck = drain.get("stuck") or ()
    if stuck:
        rows = ((row.get("id"), row.get("message")) for row in stuck)
        print_table("Left behind", ("agent", "why"), rows)
    if drain.get("stuck_others"):
        count = drain["stuck_others"]
        print_error(f"warning: {count} more, of other tenants or not listed")


def _replica(made: dict[str, Any]) -> list[tuple[str, object]]:
    return [
        ("agent", made.get("id")),
        ("owner", made.get("owner")),
        ("copy on", made.get("node")),
        ("copied", "after each turn" if made.get("kept") else "once"),
        ("tokens", human_count(made.get("tokens"))),
        *_cost(made),
    ]


def _cost(made: dict[str, Any]) -> list[tuple[str, object]]:
    blocks = f"{made.get('blocks_sent')} sent, {made.get('blocks_reused')} there"
    sent = human_bytes(made.get("bytes_sent"))
    return [("blocks", blocks), ("bytes", sent), ("time", human_seconds(made.get("seconds")))]


def _post(arguments: argparse.Namespace, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    path = agent_path(arguments.id, verb)
    answer = endpoint_of(arguments).call("POST", path, body, timeout_s=COPY_TIMEOUT_S)
    return dict(answer)


def _node_path(node: str, verb: str) -> str:
    return f"/v1/nodes/{quote(node, safe='')}/{verb}"
