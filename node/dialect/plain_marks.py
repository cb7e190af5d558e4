"""Control marks in what clients send, kept apart from those that the chat template writes.

Before a template renders messages, a character is put after the first one of each control mark in
them, so that the template copies it as other text and never searches or splits at it. Afterwards
the character is taken out, and where it stood the prompt has a plain mark:

    sent       log: <|im_end|>               rendered   <|im_start|>user log: <*|im_end|><|im_end|>
    disarmed   log: <*|im_end|>              restored   <|im_start|>user log: <|im_end|><|im_end|>
                                                                              plain     control

A client's own character of that kind is doubled. Answers and system prompts keep the marks of
thoughts and calls: templates split answers at them, and system prompts say how to use them.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from fabric.turn.control_marks import longest_of
from node.dialect.template_messages import Messages, WrittenArguments

DISARMED: Final = "\ue0f7"  # private: in no mark, and neither trimmed nor escaped by templates
_TAKEN_OUT: Final = re.compile(f"{DISARMED}{{1,2}}")
_JSON_CHAR: Final = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_HIDING: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|/)")
_WITH_ANSWER_MARKS: Final = frozenset({"assistant", "system"})
_PREFIX_CHARS: Final = 3  # texts without these prefixes have no mark


@dataclass(frozen=True, slots=True)
class RestoredText:
    """A rendered text as the model reads it, and the bytes at which its plain marks begin."""

    text: str
    plain: tuple[int, ...] = ()


class MarkFinder:
    """Finder of marks in clients' texts."""

    def __init__(self, marks: Collection[str]) -> None:
        """Look for these marks; a mark of one character cannot be disarmed."""
        known = [mark for mark in marks if len(mark) > 1]
        self._prefixes = sorted({mark[:_PREFIX_CHARS] for mark in known})
        self._pattern = re.compile(longest_of(known)) if known else None

    def places(self, text: str) -> list[int]:
        """List where marks begin, also within one another."""
        if self._pattern is None or not any(prefix in text for prefix in self._prefixes):
            return []
        places = []
        mark = self._pattern.search(text)
        while mark is not None:
            places.append(mark.start())
            mark = self._pattern.search(text, mark.start() + 1)
        return places

    def begins_at(self, text: str, at: int) -> bool:
        """Return whether a mark begins at a character."""
        return self._pattern is not None and self._pattern.match(text, at) is not None

    def disarm(self, text: str) -> str:
        """Return a text in which no mark is left."""
        if DISARMED in text:
            text = text.replace(DISARMED, 2 * DISARMED)
        places = self.places(text)
        return _cut_behind(text, [at + 1 for at in places]) if places else text

    def disarm_json(self, text: str) -> str:
        """Disarm JSON text, of which a template may show the values: there escapes hide no mark."""
        if "\\" not in text or not self.places(_HIDING.sub(_unescape, text)):
            return self.disarm(text)
        spelled = _JSON_CHAR.findall(text.replace(DISARMED, 2 * DISARMED))
        for at in self.places("".join(_HIDING.sub(_unescape, each)[-1] for each in spelled)):
            spelled[at] += DISARMED
        return "".join(spelled)


def _unescape(match: re.Match[str]) -> str:
    """Return the character of an escape that may hide one of a mark."""
    return chr(int(match[1], 16)) if match[1] else "/"


def _cut_behind(text: str, places: list[int]) -> str:
    edges = [0, *places, len(text)]
    return DISARMED.join(text[a:b] for a, b in pairwise(edges))


class PlainMarks:
    """Disarming of what clients send for one template, and the way back."""

    def __init__(self, marks: Collection[str], answer_marks: Collection[str]) -> None:
        """Take the tokenizer's control marks, and those of thoughts and calls."""
        self._all = MarkFinder(marks)
        self._others = MarkFinder([mark for mark in marks if mark not in answer_marks])

    def messages(self, messages: Messages) -> Messages:
        """Return the messages with their control marks disarmed."""
        return [self._message(message) for message in messages]

    def value(self, value: Any) -> Any:
        """Return tools, or options of the template, with their control marks disarmed."""
        return _disarm_value(value, self._all)

    def restored(self, rendered: str) -> RestoredText:
        """Return a rendered text without the characters that disarmed its marks."""
        if DISARMED not in rendered:
            return RestoredText(rendered)
        parts: list[str] = []
        places: list[tuple[int, int]] = []  # in characters and bytes
        chars = size_bytes = done = 0
        for escape in _TAKEN_OUT.finditer(rendered):
            part = rendered[done : escape.start()]
            part += DISARMED if len(escape[0]) > 1 else ""
            parts.append(part)
            chars, size_bytes = chars + len(part), size_bytes + _utf8_bytes(part)
            if len(escape[0]) == 1 and part:
                places.append((chars - 1, size_bytes - _utf8_bytes(part[-1])))
            done = escape.end()
        text = "".join([*parts, rendered[done:]])
        plain = (at for at_char, at in places if self._all.begins_at(text, at_char))
        return RestoredText(text, tuple(plain))

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the same keys; its role, set by the server, is not disarmed."""
        finder = self._others if message.get("role") in _WITH_ANSWER_MARKS else self._all
        return {
            key: value if key == "role" else _disarm_value(value, finder)
            for key, value in message.items()
        }


def _disarm_value(value: Any, finder: MarkFinder, key: str = "") -> Any:
    if isinstance(value, str):
        return finder.disarm_json(value) if key == "arguments" else finder.disarm(value)
    if isinstance(value, list):
        return [_disarm_value(item, finder) for item in value]
    if not isinstance(value, dict):
        return value
    disarmed = {
        finder.disarm(name): _disarm_value(item, finder, name) for name, item in value.items()
    }
    if isinstance(value, WrittenArguments):
        return WrittenArguments(finder.disarm_json(value.text), disarmed)
    return disarmed


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
