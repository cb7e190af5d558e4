"""Commands that change one agent: where it is, how long it is kept, what may reuse it."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.cli.confirmation import add_confirmation, confirm_loss
from router.cli.endpoint import add_agent_id, add_fabric_options, agent_of
from router.cli.errors import FAILED
from router.cli.move_progress import move_progress
from router.cli.output import (
    human_bytes,
    human_count,
    human_seconds,
    print_answer,
    print_pairs,
    print_table,
)
from router.cli.terminal import print_json, print_line
from router.client.client import FabricAgent

Json = dict[str, Any]
Pairs = list[tuple[str, object]]
Option = tuple[str, Mapping[str, Any]]

_MESSAGE = "a tool call's id, or message:N"


@dataclass(frozen=True, slots=True)
class Verb:
    """Command on an agent: its request, the answer as pairs for people, help, options."""

    name: str
    request: Callable[[FabricAgent, argparse.Namespace], Json]
    pairs: Callable[[Json, argparse.Namespace], Pairs]
    description: str
    options: tuple[Option, ...] = ()


def _option(name: str, **settings: Any) -> Option:
    return name, settings


def _move_rows(answer: Json, arguments: argparse.Namespace) -> Pairs:
    paused = human_seconds(answer.get("pause_seconds"))
    return [
        ("agent", arguments.id),
        *((name, answer.get(name)) for name in ("from", "to", "epoch")),
        *_transfer(answer)[:2],
        ("time", f"{human_seconds(answer.get('seconds'))} in all, {paused} of it paused"),
    ]


def _fork_rows(answer: Json, arguments: argparse.Namespace) -> Pairs:
    return [
        ("agent", answer.get("id")),
        ("forked from", arguments.id),
        ("node", answer.get("node")),
        ("tokens", human_count(answer.get("tokens"))),
        *_transfer(answer),
    ]


def _replica_rows(answer: Json, _: argparse.Namespace) -> Pairs:
    return [
        ("agent", answer.get("id")),
        ("owner", answer.get("owner")),
        ("copy on", answer.get("node")),
        ("copied", "after each turn" if answer.get("kept") else "once"),
        ("tokens", human_count(answer.get("tokens"))),
        *_transfer(answer),
    ]


def _prefetch_rows(answer: Json, arguments: argparse.Namespace) -> Pairs:
    if answer.get("object") == "agent.replica":
        return _replica_rows(answer, arguments)
    return [
        ("agent", arguments.id),
        ("node", answer.get("node")),
        ("in", ", ".join(answer.get("tiers") or ())),
        ("memory", human_bytes((answer.get("bytes") or {}).get("hot"))),
    ]


def _pin_rows(answer: Json, arguments: argparse.Namespace) -> Pairs:
    state = "not pinned"
    if answer.get("pinned"):
        over = "pinned without effect: this tenant's pins exceed their share of the disk"
        state = "pinned" if answer.get("pin_held") else over
    return [("agent", arguments.id), ("node", answer.get("node")), ("pin", state)]


def _retention(answer: Json, arguments: argparse.Namespace) -> Pairs:
    decays_s = answer.get("decays_after_s")
    return [
        ("agent", arguments.id),
        ("node", answer.get("node")),
        ("memory", ", ".join(answer.get("tiers") or ["nowhere"])),
        ("closed", "yes" if answer.get("closed") else "no"),
        ("decays", "no" if decays_s is None else f"after {decays_s:g} s without a turn"),
        ("shared with", "its tenant" if answer.get("share") == "tenant" else "no other agent"),
    ]


def _supersede_rows(answer: Json, arguments: argparse.Namespace) -> Pairs:
    return [("agent", arguments.id), ("operation", answer.get("operation"))]


def _rebuilt(answer: Json, arguments: argparse.Namespace) -> Pairs:
    exact = answer.get("exact_tokens")
    need = "not needed" if exact is None else f"from token {exact} on, with its next turn"
    return [("agent", arguments.id), ("rebuild", need)]


def _transfer(answer: Json) -> Pairs:
    blocks = f"{answer.get('blocks_sent')} sent, {answer.get('blocks_reused')} there"
    sent = human_bytes(answer.get("bytes_sent"))
    return [("blocks", blocks), ("bytes", sent), ("time", human_seconds(answer.get("seconds")))]


def _message(name: str) -> str | int:
    """Read a message's number (`message:N`) or a tool call's id."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "message" and number.isdigit() else name


def _migrate(agent: FabricAgent, arguments: argparse.Namespace) -> Json:
    with move_progress(agent, quiet=arguments.json):
        return agent.migrate(arguments.to)


VERBS = (
    Verb(
        "migrate",
        _migrate,
        _move_rows,
        "Move an agent to another node, also in the middle of an answer, which continues there. To "
        "undo it, move the agent back.",
        (_option("--to", required=True, metavar="NODE", help="its new node"),),
    ),
    Verb(
        "fork",
        lambda agent, a: agent.fork(a.name, a.to),
        _fork_rows,
        "Make a new agent with the context of another one, which stays as it is. `macfabric erase "
        "NEW` undoes it.",
        (
            _option("--as", dest="name", required=True, metavar="NEW", help="its name"),
            _option("--to", metavar="NODE", help="its node (default: the other agent's)"),
        ),
    ),
    Verb(
        "replicate",
        lambda agent, a: agent.replicate(a.to, keep=not a.once),
        _replica_rows,
        "Keep a copy of an agent on another node, which takes over if the agent's node fails. "
        "`macfabric evict ID --copy-on NODE` undoes it.",
        (
            _option("--to", required=True, metavar="NODE", help="the node that keeps it"),
            _option("--once", action="store_true", help="copy now, and not after each turn"),
        ),
    ),
    Verb(
        "prefetch",
        lambda agent, a: agent.prefetch(a.to),
        _prefetch_rows,
        "Load an agent into RAM ahead of its turn, or bring a copy to another node's disk. "
        "`macfabric evict ID` undoes it.",
        (_option("--to", metavar="NODE", help="bring a copy to this node's disk instead"),),
    ),
    Verb(
        "pin",
        lambda agent, a: agent.pin(pinned=not a.off),
        _pin_rows,
        "Make an agent the last to be evicted. --off undoes it.",
        (_option("--off", action="store_true", help="evict it like any other again"),),
    ),
    Verb(
        "decay",
        lambda agent, a: agent.decay(None if a.off else a.after),
        _retention,
        "Evict an agent before others, at once or later. --off undoes it; what has been evicted "
        "meanwhile is computed again at its next turn.",
        (
            _option("--after", type=float, default=0.0, metavar="S", help="after S idle seconds"),
            _option("--off", action="store_true", help="evict it like any other again"),
        ),
    ),
    Verb(
        "close",
        lambda agent, _: agent.close(),
        _retention,
        "Drop a finished agent from RAM, remove its pin, and evict it from disk before others. Its "
        "next turn undoes that, but not the removal of the pin.",
    ),
    Verb(
        "share",
        lambda agent, a: agent.share(a.scope),
        _retention,
        "Choose which agents may reuse an agent's memory. The other --scope undoes it; but with "
        "--scope agent, what others have borrowed is removed, and they compute it again.",
        (
            _option(
                "--scope",
                choices=("tenant", "agent"),
                default="tenant",
                help="all agents of the tenant, or this agent alone (default: %(default)s)",
            ),
        ),
    ),
    Verb(
        "evict",
        lambda agent, a: agent.evict(a.copy_on),
        _retention,
        "Drop an agent from RAM, or a copy of it from disk. The only copy is never dropped. "
        "`macfabric prefetch ID` and `replicate` undo it.",
        (_option("--copy-on", metavar="NODE", help="the copy on that node's disk instead"),),
    ),
    Verb(
        "supersede",
        lambda agent, a: agent.supersede(a.earlier, a.later, a.edits),
        _supersede_rows,
        "Mark a tool result as replaced by a later one: the agent then reads that it was. "
        "`macfabric direct ID --undo OPERATION` undoes it.",
        (
            _option("earlier", metavar="EARLIER", type=_message, help=_MESSAGE),
            _option("later", metavar="LATER", type=_message, help=_MESSAGE),
            _option(
                "--edits",
                choices=("exact", "amortize"),
                default="exact",
                help="recompute what follows the edit, or keep it (default: %(default)s)",
            ),
        ),
    ),
    Verb(
        "rebuild",
        lambda agent, _: agent.rebuild(),
        _rebuilt,
        "Recompute an agent's memory after edits, at its next turn. This cannot be undone: what "
        "was kept after edits is replaced.",
    ),
)


def add_agent_verbs(commands: Any) -> None:
    """Declare the commands."""
    for verb in VERBS:
        parser = commands.add_parser(verb.name, description=verb.description)
        add_agent_id(parser)
        for name, settings in verb.options:
            parser.add_argument(name, **settings)
        add_fabric_options(parser)
        parser.set_defaults(run=partial(run_verb, verb))
    erase = commands.add_parser(
        "erase",
        description="Remove every byte of an agent, on every node, and print a receipt. This "
        "cannot be undone: to keep a copy, run `macfabric hibernate ID FILE` first. On a terminal "
        "it asks before it erases.",
    )
    add_agent_id(erase)
    erase.add_argument(
        "--runs",
        action="store_true",
        help="also remove ended scenario runs that quote it",
    )
    add_confirmation(erase)
    add_fabric_options(erase)
    erase.set_defaults(run=run_erase)


def run_verb(verb: Verb, arguments: argparse.Namespace) -> int:
    """Send the command's request and print the answer."""
    answer = verb.request(agent_of(arguments), arguments)
    return print_answer(answer, verb.pairs(answer, arguments), as_json=arguments.json)


def run_erase(arguments: argparse.Namespace) -> int:
    """Erase an agent and print the receipt; return 1 while a node has not erased its part."""
    confirm_loss(f"erase {arguments.id} on every node", is_confirmed=arguments.yes)
    receipt = agent_of(arguments).erase(runs=arguments.runs)
    if arguments.json:
        print_json(receipt)
    else:
        _print_receipt(receipt)
    return 0 if receipt.get("deleted") else FAILED


def _print_receipt(receipt: Json) -> None:
    removed = f"{receipt.get('blocks_removed')} blocks, {human_bytes(receipt.get('bytes_removed'))}"
    pairs: Pairs = [("agent", receipt.get("id")), ("removed", removed)]
    if receipt.get("derived_agents"):
        tokens, agents = receipt.get("derived_tokens"), receipt.get("derived_agents")
        pairs.append(("borrowed", f"{tokens} tokens of {agents} other agents dropped"))
    print_pairs(pairs)
    print_table(
        "Receipt",
        ("node", "record", "blocks", "bytes", "blocks kept for other agents"),
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
        print_line(f"warning: {node} is unreachable; it erases its part when it returns")
    if receipt.get("remembered") == []:
        print_line("warning: no node could record the erasure; repeat it later")


def _has_removed_record(part: Json) -> bool:
    others = part.get("other_models") or {}
    return any((part.get("record_removed"), part.get("quarantined_removed"), others.get("records")))
