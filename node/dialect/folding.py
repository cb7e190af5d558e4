"""Messages that a chat template refuses, merged into their neighbours.

The rules follow the families' own guides: system text goes before the user's, and consecutive
messages of one role are merged. Nothing moves ahead of earlier messages, so a cached prefix stays
valid.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fabric.errors import RejectedError
from node.dialect.template_messages import (
    Messages,
    TemplateTraits,
    alternative_forms,
    arguments_text,
)


@dataclass(frozen=True, slots=True)
class Fold:
    """Change of messages, and the note that reports it."""

    note: str
    change: Callable[[Messages], Messages]


@dataclass(frozen=True, slots=True)
class FoldedMessages:
    """Messages, and the notes of what was changed."""

    messages: Messages
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of a prompt, and the notes of what was changed in the messages for it."""

    text: str
    notes: tuple[str, ...] = ()
    ends: list[int] | None = None  # byte end of each token, if the client sent tokens
    begun: str = ""  # the text's end that belongs to the answer, such as the mark of a thought
    plain: tuple[int, ...] = ()  # bytes at which control marks begin that are plain text
    messages: tuple[dict[str, Any], ...] = field(default=(), repr=False)  # as they were rendered


def fold(begun: FoldedMessages) -> Iterator[FoldedMessages]:
    """Yield alternatives to try: each fold alone, all in sequence, then with calls as text."""
    for step in FOLDS:
        changed = step.change(begun.messages)
        if changed != begun.messages:
            yield FoldedMessages(changed, (*begun.notes, step.note))
    yield from islice(_fold_in_sequence(begun), 1, None)
    textual = TEXT_CALLS.change(begun.messages)
    if textual != begun.messages:
        folded = FoldedMessages(textual, (*begun.notes, TEXT_CALLS.note))
        yield folded
        yield from _fold_in_sequence(folded)


def _fold_in_sequence(folded: FoldedMessages) -> Iterator[FoldedMessages]:
    """Yield the messages after each fold that changes them, and all those before it."""
    for step in FOLDS:
        changed = step.change(folded.messages)
        if changed != folded.messages:
            folded = FoldedMessages(changed, (*folded.notes, step.note))
            yield folded


def render_folded(
    messages: Messages,
    attempt: Callable[[Messages], str],
    traits: TemplateTraits,
    *,
    is_strict: bool,
) -> Rendered:
    """Render by `attempt`, which raises RejectedError for messages that the template refuses.

    What the template is known to drop silently is folded, too: system messages and calls.
    """
    single = SINGLE_CALLS if traits.takes_one_call else None
    needed = single if traits.takes_calls else TEXT_CALLS
    changed = messages if needed is None or is_strict else needed.change(messages)
    folded = FoldedMessages(messages, ())
    if needed is not None and changed != messages:
        folded = FoldedMessages(changed, (needed.note,))
    incomplete: Rendered | None = None
    refusal: RejectedError | None = None
    for candidate in _candidates(folded, is_strict=is_strict):
        try:
            text = attempt(candidate.messages)
        except RejectedError as error:
            refusal = refusal or error
            continue
        rendered = Rendered(text, candidate.notes, messages=tuple(candidate.messages))
        if is_strict or _has_system_texts(messages, text):
            return rendered
        incomplete = incomplete or rendered
    if incomplete is None:
        assert refusal is not None, "there is at least one candidate"
        raise refusal
    return incomplete


def _candidates(begun: FoldedMessages, *, is_strict: bool) -> Iterator[FoldedMessages]:
    yield begun
    yield from (FoldedMessages(form, begun.notes) for form in alternative_forms(begun.messages))
    if is_strict:
        return
    last = None
    for last in fold(begun):
        yield last
    if last is not None:
        yield from (FoldedMessages(form, last.notes) for form in alternative_forms(last.messages))


def _has_system_texts(messages: Messages, text: str) -> bool:
    """Return whether the prompt has all system messages."""
    systems = (m.get("content") or "" for m in messages if m.get("role") == "system")
    return all(system.strip() in text for system in systems)


def _merge(role: str) -> Callable[[Messages], Messages]:
    """Return a change that merges consecutive messages of a role."""

    def merge(messages: Messages) -> Messages:
        merged: Messages = []
        for message in messages:
            last = merged[-1] if merged else None
            is_plain = not message.get("tool_calls") and isinstance(message.get("content"), str)
            if (
                last is not None
                and last["role"] == message["role"] == role
                and is_plain
                and not last.get("tool_calls")
            ):
                content = _join(last.get("content") or "", message["content"])
                merged[-1] = {**last, **message, "content": content}
            else:
                merged.append(message)
        return merged

    return merge


def _join(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _fold_late_systems(messages: Messages) -> Messages:
    """Put system messages other than the first into the user's message beside them."""
    return messages[:1] + _fold_systems(messages[1:])


def _fold_systems(messages: Messages) -> Messages:
    """Put system messages into the user's message beside them."""
    folded: Messages = []
    pending = ""  # system text for the next message of the user
    for message in messages:
        if message["role"] == "system":
            pending = _join(pending, message.get("content") or "")
            continue
        if pending and message["role"] != "user":
            _append_to_user(folded, pending)
            pending = ""
        if pending:
            message = {**message, "content": _join(pending, message.get("content") or "")}  # noqa: PLW2901
            pending = ""
        folded.append(message)
    if pending:
        _append_to_user(folded, pending)
    return folded


def _append_to_user(messages: Messages, text: str) -> None:
    """Add text to the last message if it is the user's, or as a new one."""
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": _join(messages[-1].get("content") or "", text)}
    else:
        messages.append({"role": "user", "content": text})


def _split_calls(messages: Messages) -> Messages:
    """Give each call a message of its own, followed by its result."""
    split: Messages = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            split.append(message)
            continue
        results: Messages = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(calls):
            empty = {"role": "assistant", "content": message.get("content") and ""}
            split.append({**(empty if number else message), "tool_calls": [call]})
            own_results = (r for r in results if r.get("tool_call_id") == call.get("id"))
            result = next(own_results, results[0] if results else None)
            if result is not None:
                split.append(result)
                results = [r for r in results if r is not result]
        split += results
    return split


_CONTINUED = {"role": "assistant", "content": "OK."}  # some templates refuse an empty text


def _answer_results(messages: Messages) -> Messages:
    """Put an answer between calls or results and a message of the user.

    Templates that require roles to alternate count neither, so they see the user twice.
    """
    answered: Messages = []
    for message in messages:
        last = answered[-1] if answered else {"role": ""}
        is_open = last["role"] == "tool" or last.get("tool_calls")
        if is_open and message["role"] == "user":
            answered.append(dict(_CONTINUED))
        answered.append(message)
    return answered


def _open_by_user(messages: Messages) -> Messages:
    """Put a message of the user before an answer that begins the conversation."""
    first = next((at for at, each in enumerate(messages) if each["role"] != "system"), 0)
    if not messages or messages[first]["role"] != "assistant":
        return messages
    return [*messages[:first], {"role": "user", "content": "Hello."}, *messages[first:]]


def _write_calls_as_text(messages: Messages) -> Messages:
    """Write calls into the assistant's text, and results as messages of the user."""
    written: Messages = []
    names: dict[str, str] = {}
    for message in messages:
        text, calls = message.get("content") or "", message.get("tool_calls") or []
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id") or "", "the tool")
            written.append({"role": "user", "content": f"Result of {name}:\n{text}"})
            continue
        if calls:
            names |= {call.get("id") or "": call["function"]["name"] for call in calls}
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**plain, "content": _join(text, *map(_call_text, calls))}  # noqa: PLW2901
        written.append(message)
    return written


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    return f"Called {function['name']} with {arguments_text(function['arguments'])}"


SINGLE_CALLS = Fold("gave each tool call a message of its own", _split_calls)
TEXT_CALLS = Fold("wrote tool calls and their results as text", _write_calls_as_text)
FOLDS = (
    Fold("merged system messages", _merge("system")),
    Fold("folded later system messages into the user's", _fold_late_systems),
    Fold("merged messages of the user", _merge("user")),
    Fold("merged messages of the assistant", _merge("assistant")),
    Fold("put an answer between a tool's result and the user's message", _answer_results),
    SINGLE_CALLS,
    Fold("put a message of the user before the first answer", _open_by_user),
    Fold("folded the system message into the user's", _fold_systems),
)
