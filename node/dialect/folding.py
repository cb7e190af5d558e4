"""Fold messages that a chat template refuses into their neighbours, and say so.

Families' guides tell how: system text goes in front of the user's, messages of one speaker in a
row become one. Nothing is moved ahead of what came before it: what was computed stays valid.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fabric.errors import RejectedError
from node.dialect.spelling import Messages, respelled

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Fold:
    """One way to fold, and what it is called."""

    note: str
    change: Callable[[Messages], Messages]


@dataclass(frozen=True, slots=True)
class Folded:
    """Messages, and what was done to them."""

    messages: Messages
    notes: tuple[str, ...]


def folded(messages: Messages) -> Iterator[Folded]:
    """Yield what else to try: each fold by itself, then all of them one upon the other."""
    for fold in FOLDS:
        changed = fold.change(messages)
        if changed != messages:
            yield Folded(changed, (fold.note,))
    made = Folded(messages, ())
    for fold in FOLDS:
        changed = fold.change(made.messages)
        if changed != made.messages:
            made = Folded(changed, (*made.notes, fold.note))
            if len(made.notes) > 1:
                yield made


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text, and what was done to the messages for it."""

    text: str
    notes: tuple[str, ...] = ()
    ends: list[int] | None = None  # of each token, in bytes, where a client sent the tokens


def render_folded(
    messages: Messages,
    attempt: Callable[[Messages], str],
    *,
    is_strict: bool,
    takes_one_call: bool = False,
) -> Rendered:
    """Render by `attempt`, which raises RejectedError for what the template refuses.

    What it drops without a word, as some do with system messages, is folded, too; so are calls
    where it `takes_one_call` of a message.
    """
    if takes_one_call and not is_strict:
        single = SINGLE_CALLS.change(messages)
        if single != messages:
            rendered = render_folded(single, attempt, is_strict=is_strict)
            return replace(rendered, notes=(SINGLE_CALLS.note, *rendered.notes))
    plain: Rendered | None = None
    refusal: RejectedError | None = None
    for made in _tried(messages, is_strict=is_strict):
        try:
            text = attempt(made.messages)
        except RejectedError as error:
            refusal = refusal or error
            continue
        if is_strict or _says_all(messages, text):
            return Rendered(text, made.notes)
        plain = plain or Rendered(text, made.notes)
    if plain is None:
        assert refusal is not None, "something was tried"
        raise refusal
    return plain


def _tried(messages: Messages, *, is_strict: bool) -> Iterator[Folded]:
    yield Folded(messages, ())
    yield from (Folded(each, ()) for each in respelled(messages))
    if is_strict:
        return
    last = None
    for last in folded(messages):
        yield last
    if last is not None:
        yield from (Folded(each, last.notes) for each in respelled(last.messages))


def _says_all(messages: Messages, text: str) -> bool:
    """Say whether no system message was dropped."""
    said = (m.get("content") or "" for m in messages if m.get("role") == "system")
    return all(each.strip() in text for each in said)


def _merge(messages: Messages, roles: frozenset[str]) -> Messages:
    made: Messages = []
    for message in messages:
        last = made[-1] if made else None
        is_plain = not message.get("tool_calls") and isinstance(message.get("content"), str)
        if (
            last is not None
            and last["role"] == message["role"] in roles
            and is_plain
            and not last.get("tool_calls")
        ):
            content = _joined(last.get("content") or "", message["content"])
            made[-1] = {**last, **message, "content": content}
        else:
            made.append(message)
    return made


def _joined(*texts: str) -> str:
    return _BETWEEN.join(text for text in texts if text)


def _merged_systems(messages: Messages) -> Messages:
    return _merge(messages, frozenset({"system"}))


def _merged_users(messages: Messages) -> Messages:
    return _merge(messages, frozenset({"user"}))


def _merged_answers(messages: Messages) -> Messages:
    return _merge(messages, frozenset({"assistant"}))


def _late_systems(messages: Messages) -> Messages:
    """Put a system message that is not the first into the user's message beside it."""
    return messages[:1] + _into_users(messages[1:])


def _first_system(messages: Messages) -> Messages:
    """Put the first system message into the user's message beside it."""
    return _into_users(messages)


def _into_users(messages: Messages) -> Messages:
    made: Messages = []
    held = ""  # system text for the user's message that follows
    for message in messages:
        if message["role"] == "system":
            held = _joined(held, message.get("content") or "")
            continue
        if held and message["role"] != "user":
            _say(made, held)
            held = ""
        if held:
            message = {**message, "content": _joined(held, message.get("content") or "")}  # noqa: PLW2901
            held = ""
        made.append(message)
    if held:
        _say(made, held)
    return made


def _say(made: Messages, text: str) -> None:
    """Add text to the user's last message, or as one."""
    if made and made[-1]["role"] == "user":
        made[-1] = {**made[-1], "content": _joined(made[-1].get("content") or "", text)}
    else:
        made.append({"role": "user", "content": text})


def _single_calls(messages: Messages) -> Messages:
    """Give each call a message of its own, with its result behind it."""
    made: Messages = []
    left = list(messages)
    while left:
        message = left.pop(0)
        uses = message.get("tool_calls") or []
        if len(uses) < 2:
            made.append(message)
            continue
        results: Messages = []
        while left and left[0]["role"] == "tool":
            results.append(left.pop(0))
        for number, use in enumerate(uses):
            rest = {"role": "assistant", "content": message.get("content") and ""}
            made.append({**(rest if number else message), "tool_calls": [use]})
            mine = [r for r in results if r.get("tool_call_id") == use.get("id")] or results[:1]
            made += mine[:1]
            results = [r for r in results if all(r is not each for each in mine[:1])]
        made += results
    return made


SINGLE_CALLS = Fold("gave each tool call a message of its own", _single_calls)
FOLDS = (
    Fold("merged system messages", _merged_systems),
    Fold("folded later system messages into the user's", _late_systems),
    Fold("merged messages of the user", _merged_users),
    Fold("merged messages of the assistant", _merged_answers),
    SINGLE_CALLS,
    Fold("folded the system message into the user's", _first_system),
)
