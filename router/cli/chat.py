"""`macfabric chat`: talk to an agent in the terminal, or ask it one thing."""

import argparse
import contextlib
import re
import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.control.calls import NODE_HEADER
from router.cli.endpoint import add_fabric_options, agent_of
from router.cli.errors import MISUSED, CommandError
from router.cli.output import human_count, human_seconds
from router.cli.terminal import (
    ProgressBar,
    errors_are_terminal,
    input_is_terminal,
    print_error,
    print_json,
    print_line,
    print_part,
    read_line,
    start_bar,
)
from router.client.client import FabricAgent
from router.client.http_api import ClientError, RefusedError
from router.limits import CHAT_INPUT_CHARS_MAX, CHAT_RETRY_S_MAX, CHAT_TRIES_MAX

PROMPT: Final = "> "
TURN_TIMEOUT_S: Final = 600.0  # of silence: a turn may wait for its place
NAME_BYTES: Final = 4
_PREFILL: Final = re.compile(r"prefill (\d+)/(\d+)", re.ASCII)
TEMPORARY: Final = (429, 503)  # a queue is full; nodes start, or an agent moves


@dataclass(slots=True)
class ChatAnswer:
    """Answer of an agent, and its figures."""

    node: str
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    seconds: float = 0.0


class _PrefillBar:
    """Bar of a prompt's tokens on a terminal, until its answer begins."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: ProgressBar | None = None

    def note(self, comment: str) -> None:
        """Show a comment of the stream, such as `prefill 4096/12000`."""
        match = _PREFILL.fullmatch(comment)
        if not self._is_shown or match is None:
            return
        done, total = map(int, match.groups())
        if self._bar is None:
            self._bar = start_bar("prefill", total)
        self._bar.update(done, "prefill")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def add_chat(commands: Any) -> None:
    """Declare the command."""
    chat = commands.add_parser(
        "chat",
        description="Talk to an agent: each line is a message, until Ctrl-D; Ctrl-C stops an "
        "answer. With TEXT, or with text on standard input, ask that and end. An existing "
        "agent is continued, whichever client created it. `macfabric erase ID` removes it.",
    )
    chat.add_argument("id", nargs="?", metavar="ID", help="the agent (default: a new one)")
    chat.add_argument("text", nargs="?", metavar="TEXT", help="one message")
    chat.add_argument("--system", metavar="TEXT", help="instructions for a new agent")
    chat.add_argument("--model", help="model of a new agent, if several are served")
    chat.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer (default: the model's limit)"
    )
    chat.set_defaults(run=run_chat)
    add_fabric_options(chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """Ask once, or talk until the end of the input."""
    if arguments.id is None:
        arguments.id = f"chat-{secrets.token_hex(NAME_BYTES)}"
    agent, text = agent_of(arguments), arguments.text
    if text is None and not input_is_terminal():
        text = sys.stdin.read(CHAT_INPUT_CHARS_MAX + 1) if sys.stdin else ""
        if len(text) > CHAT_INPUT_CHARS_MAX:
            message = f"standard input has more than {CHAT_INPUT_CHARS_MAX:,} characters"
            raise CommandError(message, MISUSED)
    if text is not None:
        if not text.strip():
            message = "there is no message: give TEXT, or send it on standard input"
            raise CommandError(message, MISUSED)
        _ask(agent, text, arguments)
        return 0
    print_error(
        f"agent {agent.name}: each line is a message, Ctrl-D ends. "
        f"`macfabric chat {agent.name}` continues, `macfabric erase {agent.name}` removes it."
    )
    _talk(agent, arguments)
    return 0


def _talk(agent: FabricAgent, arguments: argparse.Namespace) -> None:
    """Send lines of the terminal until its end; a failed or stopped answer ends nothing."""
    while True:
        try:
            line = read_line(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print_error("")
            return
        if not line.strip():
            continue
        try:
            _ask(agent, line, arguments)
        except KeyboardInterrupt:
            print_error("\n(stopped)")
        except ClientError as error:
            print_error(f"macfabric: {error}")
        else:
            arguments.system = None  # it is a part of the agent now


def _ask(agent: FabricAgent, text: str, arguments: argparse.Namespace) -> None:
    """Send one message, and print its answer as it comes."""
    messages = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    body: dict[str, Any] = {"messages": messages, "stream": True}
    if arguments.model is not None:
        body["model"] = arguments.model
    if arguments.max_tokens is not None:
        body["max_tokens"] = arguments.max_tokens
    answer = _answer(agent, body, quiet=arguments.json)
    if arguments.json:
        print_json(_row(agent, answer), indent=None, flush=True)
    else:
        print_line(flush=True)
        print_error(f"({_figures(answer)})")


def _answer(agent: FabricAgent, body: dict[str, Any], *, quiet: bool) -> ChatAnswer:
    """Send a request, and again while the fabric names a time when it can be answered."""
    for tries_left in reversed(range(CHAT_TRIES_MAX)):
        try:
            return _stream(agent, body, quiet=quiet)
        except RefusedError as refused:
            if refused.status not in TEMPORARY or refused.retry_after_s is None or not tries_left:
                raise
            wait_s = min(refused.retry_after_s, CHAT_RETRY_S_MAX)
            print_error(f"macfabric: {refused}; retrying in {human_seconds(wait_s)}")
            time.sleep(wait_s)
    message = "the last try returns or raises"
    raise AssertionError(message)


def _stream(agent: FabricAgent, body: dict[str, Any], *, quiet: bool) -> ChatAnswer:
    began_s = time.perf_counter()
    path = f"{agent.path}/generate"
    bar = _PrefillBar(is_shown=not quiet and errors_are_terminal())
    with (
        contextlib.closing(bar),
        agent.fabric.stream(
            "POST", path, body, timeout_s=TURN_TIMEOUT_S, on_comment=bar.note
        ) as events,
    ):
        answer = ChatAnswer(events.headers.get(NODE_HEADER, ""))
        for event in events:
            bar.close()
            if "error" in event.data:
                raise ClientError(str(event.data["error"].get("message")))
            if answer.first_token_s is None:
                answer.first_token_s = time.perf_counter() - began_s
            _take(answer, event.name, event.data, quiet=quiet)
    answer.seconds = time.perf_counter() - began_s
    if not answer.end:
        message = f"{agent.fabric.url} ended the stream in the middle of an answer"
        raise ClientError(message)
    return answer


def _take(answer: ChatAnswer, name: str, data: dict[str, Any], *, quiet: bool) -> None:
    """Add one event to an answer; thoughts and calls go to standard error."""
    if name == "end":
        answer.end = data
    elif name == "tool_call":
        answer.calls.append(data)
        if not quiet:
            print_error(f"calls {data.get('name')} {data.get('arguments')}")
    elif name in ("text", "reasoning"):
        text = str(data.get("text") or "")
        (answer.text if name == "text" else answer.thoughts).append(text)
        if not quiet:
            print_part(text, to_errors=name == "reasoning")


def _figures(answer: ChatAnswer) -> str:
    end = answer.end
    reused = f"{human_count(end.get('cached_tokens'))} of {human_count(end.get('prompt_tokens'))}"
    first = human_seconds(answer.first_token_s)
    spent = f"{human_count(end.get('completion_tokens'))} tokens in {human_seconds(answer.seconds)}"
    cut = "; cut off at the limit of tokens" if end.get("finish_reason") == "length" else ""
    return f"{answer.node}: {reused} tokens reused, first token after {first}, {spent}{cut}"


def _row(agent: FabricAgent, answer: ChatAnswer) -> dict[str, Any]:
    return {
        "id": agent.name,
        "node": answer.node,
        "text": "".join(answer.text),
        "reasoning": "".join(answer.thoughts),
        "tool_calls": answer.calls,
        **answer.end,
        "first_token_s": answer.first_token_s,
        "seconds": answer.seconds,
    }
