"""Policy that drops failed tool calls and their results once a later call of that tool succeeded.

A result counts as failed if the client flags it, or if its text is unmistakably an error: an exit
code, an error object, or an error in the first line that is not a count or an empty field
(`failed: 0`). The test is strict because a false positive removes a good result from the
conversation, while a miss only leaves the conversation longer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.turn.messages import Message, MessageRole
from router.policies.exchanges import Exchange, exchanges_of
from router.policies.policy import EditPolicy, PolicyTurn

_END_CHARS: Final = 1_000  # of each end of a result, which are read
_HEAD_LINES: Final = 8  # in which wrappers of shells report the exit code
_TAIL_LINES: Final = 6
_JSON_CHARS: Final = 10_000  # longer objects count as successes
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_EXIT: Final = re.compile(
    r"(?:error: )?(?:(?:process|command|shell command|script) )?"
    r"(?:failed with |exited with |finished with |returned )?(?:a )?(?:non-zero )?"
    r"(?:exit[ _]?code|exit status|return ?code|(?<=exited with )code|(?<=exited with )status)"
    r"\s*[:=]?\s*(-?\d{1,10})\.?"
    r"|</?(?:error|returncode|exit_code)>(?:exit code )?(-?\d{1,10})(?:</\w+>)?",
    re.IGNORECASE,
)
_NAMED: Final = re.compile(r"(?:Uncaught )?[\w.]{0,80}(?:Error|Exception)\s*(?::|\(|\[(?=[A-Z]))")
_PREFIX: Final = re.compile(
    r"(?:an )?(?:fatal |unexpected )?(?P<word>error|failed|failure|fatal|panic|exception)"
    r"(?:\s*(?:[:!]|\s-\s|\[(?=[A-Z])|\((?=exit|code|status|http|[1-9]\d\d\b))"
    r"|\s+(?:occurred|while|executing|calling|invoking|running)\b|(?P<alone>\s*$))",
    re.IGNORECASE,
)
_FIRST: Final = re.compile(
    r"Traceback \(most recent call last\)|<(?:tool_use_)?error\b|npm (?:ERR!|error) \S"
    r"|Exception in thread \"|thread '[^']{0,80}' (?:\(\d+\) )?panicked at "
    r"|node:internal/\S{1,80}:\d+$|\S{1,200}:\d+:\d+: (?:fatal )?error: "
    r"|(?:Command|Tool|Tool call|Process|Request|Operation) timed out\b"
)
_LAST: Final = re.compile(
    r"(?:g?make|ninja)(?:\[\d+\])?: \*\*\* |Node\.js v\d+\.\d+|exit status [1-9]\d*$"
    r"|error: (?:could not compile|aborting due to|failed to push some refs|Recipe `)"
    r"|ERROR: (?:No matching distribution|Could not install packages|Failed building wheel)"
    r"|=+ .{0,40}\b[1-9]\d* (?:failed|errors?)\b.{0,80} in [\d.]+s|test result: FAILED\."
    r"|FAIL(?:$|\t\S)|Automatic merge failed;|BUILD FAILED|\[ERROR\] .{0,40}\[Help 1\]"
)
# A shell's and small tools' own complaints; every line of a result has to be one.
_SHELL: Final = re.compile(
    r"[\w./+-]{1,60}: (?:.{0,300}: )?(?:command not found|not found|No such file or directory"
    r"|Permission denied|Is a directory|Not a directory|No space left on device)"
    r"|\w{2,8}: command not found: \S+|Failed to [a-z]+ .{1,300}"
)
_NOTHING: Final = re.compile(
    r"""["'(\[{<]?\s*(?:none|no|nil|null|n/?a|false|nothing|ok|success|zero)?\s*"""
    r"""(?:errors?|failures?)?\s*(?:found|reported|detected|occurred)?\s*["')\]}>]?\s*(?:[.,;|].*|-)?$""",
    re.IGNORECASE,
)
_FIGURE: Final = re.compile(r"[-+]?[\d.,]+(?:e[-+]?\d+)?\s*%?\s*(?:[,;|(].*)?$", re.IGNORECASE)
_COUNT: Final = re.compile(r"[(\[]?\d+(?:$|[\s,;/)\]])")
_ZERO: Final = re.compile(r"[(\[]?0(?![\dx])")
_KEYS: Final = ("error", "is_error", "isError")
_EXIT_KEYS: Final = ("exit_code", "exitCode", "returncode")


def is_failed(result: Message) -> bool:
    """Return whether a result is an error."""
    return result.is_error or is_failure_text("".join(result.texts))


def is_failure_text(text: str) -> bool:
    """Return whether a result's text has the form of a failure, and of nothing else."""
    is_whole = len(text) <= 2 * _END_CHARS
    head = _lines(text if is_whole else text[:_END_CHARS])
    tail = head if is_whole else _lines(text[-_END_CHARS:])
    if not head:
        return False
    code = _exit_code([*head[:_HEAD_LINES], *tail[-_TAIL_LINES:]])
    if code is not None:
        return code != 0
    if head[0].startswith("{"):
        return len(text) <= _JSON_CHARS and _is_error_object(text)
    if _FIRST.match(head[0]) or any(map(_LAST.match, tail[-_TAIL_LINES:])):
        return True
    return _is_error_line(head) or (is_whole and all(map(_SHELL.fullmatch, head)))


def _lines(text: str) -> list[str]:
    lines = _COLOUR.sub("", text).splitlines()
    return [line.strip(" \r") for line in lines if line.strip()]


def _exit_code(lines: Sequence[str]) -> int | None:
    for line in lines:
        if found := _EXIT.fullmatch(line):
            return int(found[1] or found[2])
    return None


def _is_error_line(lines: Sequence[str]) -> bool:
    first = lines[0]
    found = _NAMED.match(first) or _PREFIX.match(first)
    if found is None:
        return False
    word = (found.groupdict().get("word") or "error").lower()
    if found.groupdict().get("alone") is not None:
        return len(lines) == 1 and word == first.lower()
    rest = first[found.end() :].strip()
    if first[: found.end()].endswith(("!", "while", "occurred", "[")):
        return True
    if not rest:  # `Error:` with its text in the next line
        rest = lines[1] if len(lines) > 1 else ""
    if _NOTHING.match(rest) or _ZERO.match(rest) or _FIGURE.match(rest):
        return False
    return not (word in {"failed", "failure"} and _COUNT.match(rest))


def _is_error_object(text: str) -> bool:
    try:
        fields = parse_json(text)
    except RejectedError:
        return False
    if not isinstance(fields, dict):
        return False
    metadata = fields.get("metadata")
    for holder in (fields, metadata if isinstance(metadata, dict) else {}):
        for key in _EXIT_KEYS:
            code = holder.get(key)
            if isinstance(code, int) and not isinstance(code, bool):
                return code != 0
    return any(_is_error_value(fields.get(key)) for key in _KEYS)


def _is_error_value(value: object) -> bool:
    if isinstance(value, str):
        return value.strip() == "no" or not _NOTHING.match(value.strip())
    return value is True or (isinstance(value, (dict, list)) and bool(value))


@dataclass(frozen=True, slots=True)
class DropFailedToolCalls(EditPolicy):
    """Dropping of failed calls; an answer keeps its text and loses its reasoning about them."""

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        dropped = _superseded_failures(messages)
        if not dropped:
            return messages
        dropped_results = {each.answered_at for each in dropped}
        calls = {(each.asked_at, each.use_at) for each in dropped}
        kept: list[Message] = []
        is_said_before = False  # the last one kept is the text of an answer without its calls
        for at, message in enumerate(messages):
            if at in dropped_results:
                continue
            kept_uses = tuple(use for i, use in enumerate(message.uses) if (at, i) not in calls)
            # Never the last message: that is a result, which stays.
            if is_said_before and message.role is MessageRole.ASSISTANT:
                message = replace(message, texts=kept.pop().texts + message.texts)  # noqa: PLW2901
            is_said_before = False
            if len(kept_uses) == len(message.uses):
                kept.append(message)
            elif kept_uses:
                kept.append(replace(message, uses=kept_uses))
            elif any(message.texts):
                kept.append(replace(message, uses=(), reasoning=None))
                is_said_before = True
        return kept


def _superseded_failures(messages: Sequence[Message]) -> list[Exchange]:
    """List failed calls whose tool succeeded in a later answer, except the conversation's last one.

    Calls of one answer run at the same time, so none of them is later than another.
    """
    failures: list[Exchange] = []
    good: set[str] = set()
    last = len(messages) - 1
    by_answer = groupby(reversed(exchanges_of(messages)), key=lambda each: each.asked_at)
    for _, calls in by_answer:
        good_here: set[str] = set()
        for each in calls:
            if each.answered_at is None:
                continue
            name, failed = each.use(messages).name, is_failed(messages[each.answered_at])
            if failed and name in good and each.answered_at < last:
                failures.append(each)
            elif not failed:
                good_here.add(name)
        good |= good_here
    return failures
