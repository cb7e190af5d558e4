"""`macfabric decay`, `close`, `share`, `evict` and `supersede`: what an agent's memory is worth."""

import argparse
from typing import Any

from router.cli.endpoint import agent_path
from router.cli.output import print_answer
from router.cli.queries import add_agent_id, add_common, endpoint_of

_BY = "a tool call's id, or message:N"


def add_agent_wishes(commands: Any) -> None:
    """Declare the commands."""
    decay = commands.add_parser("decay", help="evict an agent early, at once or later")
    add_agent_id(decay)
    decay.add_argument(
        "--after", type=float, default=0.0, metavar="S", help="once it was idle for so long"
    )
    decay.add_argument("--off", action="store_true", help="take it back")
    decay.set_defaults(run=run_decay)
    close = commands.add_parser("close", help="drop a finished agent from RAM, and evict it first")
    add_agent_id(close)
    close.set_defaults(run=run_close)
    share = commands.add_parser("share", help="choose which agents may reuse an agent's memory")
    add_agent_id(share)
    share.add_argument(
        "--scope",
        choices=("tenant", "agent"),
        default="tenant",
        help="all agents of the tenant, or this agent alone (default: %(default)s)",
    )
    share.set_defaults(run=run_share)
    evict = commands.add_parser("evict", help="drop an agent from RAM, or a copy of it from disk")
    add_agent_id(evict)
    evict.add_argument("--copy-on", metavar="NODE", help="the copy on that node's disk instead")
    evict.set_defaults(run=run_evict)
    supersede = commands.add_parser(
        "supersede", help="mark a tool result as replaced by a later one"
    )
    add_agent_id(supersede)
    supersede.add_argument("earlier", metavar="EARLIER", help=_BY)
    supersede.add_argument("later", metavar="LATER", help=_BY)
    supersede.add_argument(
        "--edits",
        choices=("exact", "amortize"),
        default="exact",
        help="recompute what follows the edit, or keep it (default: %(default)s)",
    )
    supersede.set_defaults(run=run_supersede)
    for parser in (decay, close, share, evict, supersede):
        add_common(parser)


def run_decay(arguments: argparse.Namespace) -> int:
    """Let an agent go before others, or take that back."""
    method, body = ("DELETE", None) if arguments.off else ("POST", {"after_s": arguments.after})
    return _say(arguments, method, "decay", body)


def run_close(arguments: argparse.Namespace) -> int:
    """Close an agent until its next turn."""
    return _say(arguments, "POST", "close", {})


def run_share(arguments: argparse.Namespace) -> int:
    """Say who may begin with an agent's memory."""
    return _say(arguments, "POST", "share", {"scope": arguments.scope})


def run_evict(arguments: argparse.Namespace) -> int:
    """Let go of an agent's hot memory, or of a copy."""
    copy = {"from": "disk", "node": arguments.copy_on}
    return _say(arguments, "POST", "evict", copy if arguments.copy_on else {})


def run_supersede(arguments: argparse.Namespace) -> int:
    """Replace an earlier message by a word that names the later one."""
    body = {
        "earlier": _message(arguments.earlier),
        "later": _message(arguments.later),
        "mode": arguments.edits,
    }
    path = agent_path(arguments.id, "supersede")
    answer = endpoint_of(arguments).call("POST", path, body)
    pairs = [("agent", arguments.id), ("operation", answer.get("operation"))]
    return print_answer(answer, pairs, as_json=arguments.json)


def _message(name: str) -> dict[str, Any]:
    kind, _, number = name.partition(":")
    is_number = kind == "message" and number.isdigit()
    return {"message": int(number)} if is_number else {"tool_call_id": name}


def _say(arguments: argparse.Namespace, method: str, verb: str, body: object) -> int:
    path = agent_path(arguments.id, verb)
    answer = endpoint_of(arguments).call(method, path, body)
    decays_s = answer.get("decays_after_s")
    pairs = [
        ("agent", arguments.id),
        ("node", answer.get("node")),
        ("memory", ", ".join(answer.get("tiers") or ["nowhere"])),
        ("closed", "yes" if answer.get("closed") else "no"),
        ("decays", "no" if decays_s is None else f"after {decays_s:g} s without a turn"),
        ("shared with", "its tenant" if answer.get("share") == "tenant" else "nobody"),
    ]
    return print_answer(answer, pairs, as_json=arguments.json)
