"""`macfabric direct`: edit parts of an agent's history, list them, or undo that."""

import argparse
from typing import Any

from fabric.edit_mode import DIRECTIVE_MODES
from router.cli.endpoint import add_agent_id, add_fabric_options, agent_of
from router.cli.errors import MISUSED, CommandError
from router.cli.output import print_pairs, print_table
from router.cli.terminal import print_json

CLEARED = "[cleared]"


def add_direct(commands: Any) -> None:
    """Declare the commands."""
    direct = commands.add_parser(
        "direct",
        description="Edit parts of an agent's history: from its next turn on, the agent reads them "
        "as edited. --undo and --undo-all bring back what was there.",
    )
    add_agent_id(direct)
    what = direct.add_argument_group("parts to edit (repeatable; all are edited, or none)")
    named = (
        ("--result-of", "CALL", "the result of a tool's call, by its id", str),
        ("--arguments-of", "CALL", "the arguments of a tool's call, by its id", str),
        ("--message", "N", "a message by its number: --list shows them", int),
        ("--messages", "A-B", "all messages from A to B", _numbers),
        ("--text", "TEXT", "a text that occurs once", str),
        ("--tokens", "A-B", "tokens from A up to B, all of one message", _numbers),
    )
    for option, metavar, meaning, kind in named:
        what.add_argument(
            option, action="append", default=[], metavar=metavar, help=meaning, type=kind
        )
    what.add_argument("--in", dest="within", type=int, metavar="N", help="texts in this message")
    what.add_argument("--every", action="store_true", help="edit every occurrence of a text")
    direct.add_argument(
        "--replacement", default=CLEARED, metavar="TEXT", help="the new text (default: %(default)s)"
    )
    direct.add_argument("--drop", action="store_true", help="remove the part")
    direct.add_argument(
        "--edits",
        choices=sorted(DIRECTIVE_MODES),
        default="exact",
        help="how the cache after the edit is updated: recomputed, or kept (default: %(default)s)",
    )
    direct.add_argument("--list", action="store_true", help="list messages and directives")
    direct.add_argument("--undo", metavar="OPERATION", help="undo the directives of one operation")
    direct.add_argument("--undo-all", action="store_true", help="undo all directives")
    direct.set_defaults(run=run_direct)
    add_fabric_options(direct)


def _numbers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


def run_direct(arguments: argparse.Namespace) -> int:
    """Add directives, undo them, or list messages; print the directives in force."""
    agent = agent_of(arguments)
    if arguments.undo_all or arguments.undo:
        answer = agent.undo(None if arguments.undo_all else arguments.undo)
    elif directives := list(_directives(arguments)):
        answer = agent.direct(*directives)
    elif arguments.list:
        answer = agent.memory()
    else:
        message = (
            "Name what to edit: --result-of, --arguments-of, --message, --messages, --text, "
            "--tokens, --undo or --list"
        )
        raise CommandError(message, MISUSED)
    if arguments.json:
        print_json(answer)
        return 0
    print_pairs([("agent", arguments.id), ("operation", answer.get("operation") or "-")])
    if arguments.list and "messages" in answer:
        _print_messages(answer["messages"])
    _print_directives("Directives", answer.get("directives", ()))
    if answer.get("undone"):
        _print_directives("Undone", answer["undone"])
    return 0


def _directives(arguments: argparse.Namespace) -> Any:
    text = None if arguments.drop else arguments.replacement
    how = {"replacement": text, "mode": arguments.edits}
    for call in arguments.result_of:
        yield {"tool_call_id": call, **how}
    for call in arguments.arguments_of:
        replacement = None if text == CLEARED else text  # arguments are an object, or empty
        yield {"tool_call_id": call, "part": "arguments", **how, "replacement": replacement}
    for number in arguments.message:
        yield {"message": number, **how}
    for first, last in arguments.messages:
        yield {"messages": {"first": first, "last": last}, **how}
    for text_to_find in arguments.text:
        yield {"text": text_to_find, "message": arguments.within, "every": arguments.every, **how}
    for start, end in arguments.tokens:
        yield {"start_token": start, "end_token": end, **how}


def _print_messages(messages: Any) -> None:
    rows = [
        (m["number"], m["role"], m["chars"], _range(m["start_token"], m["end_token"]),
         "edited" if m["is_edited"] else "")
        for m in messages
    ]  # fmt: skip
    print_table("Messages", ("number", "role", "characters", "tokens", ""), rows)


def _print_directives(title: str, directives: Any) -> None:
    rows = [(d["operation"], _place(d), d["mode"], d["is_applied"]) for d in directives]
    print_table(title, ("operation", "part", "mode", "applied"), rows)


def _place(directive: dict[str, Any]) -> str:
    if directive.get("part") == "arguments":
        return f"the arguments of {directive['result_of']}"
    if directive.get("result_of"):
        return f"the result of {directive['result_of']}"
    number = directive.get("message")
    of = "a prompt" if directive.get("holds_for") == ["generate"] else "a message"
    of = of if number is None else f"message {number}"
    chars = _range(directive.get("start"), directive.get("end"))
    return f"{of}, characters {chars}" if chars else of


def _range(start: object, end: object) -> str:
    return "" if start is None else f"{start}-{end}"
