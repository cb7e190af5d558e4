"""Calls as `call:NAME{key:value}`: nothing is quoted but texts, which have marks of their own."""

import re
from json import dumps, loads
from typing import Any

from node.dialect.call_body import CallBody
from node.dialect.marks import held_chars
from node.limits import CALL_HEADER_CHARS_MAX

_HEAD = re.compile(r"call:(?P<name>[\w.\-]+)\s*(?=\{)")
_WORD = re.compile(r"[^,:{}\[\]]+")
_PRINTED = {"None": "null", "True": "true", "False": "false"}  # by a template, as Python has it


class BraceCalls(CallBody):
    """Arguments are handed on in JSON as they come; `quote` stands around texts."""

    def __init__(self, tools: list[Any] | None, quote: str) -> None:
        super().__init__(tools)
        self._quote = quote
        self._is_text = False
        self._open = ""  # brackets, the innermost last
        self._is_key = False  # what comes next is one, and no value

    @property
    def is_in_value(self) -> bool:
        return self._is_text

    def _read(self) -> None:
        while self._left and not self.has_failed:
            before = len(self._left)
            if self._arguments is None:
                self._read_head()
            elif self._is_text:
                self._read_text()
            else:
                self._read_part()
            if len(self._left) == before:
                return

    def _read_head(self) -> None:
        found = _HEAD.search(self._left)
        if found is not None:
            self._take(found.end())
            self._begin(found["name"])
        elif not self.calls_count:
            self.has_failed = len(self._left) > CALL_HEADER_CHARS_MAX

    def _read_text(self) -> None:
        at = self._left.find(self._quote)
        size = len(self._quote)
        self._is_text = at < 0
        if self._is_text:
            at = len(self._left) - held_chars(self._left, (self._quote,), size)
        self._write(dumps(self._take(at), ensure_ascii=False)[1:-1])
        if not self._is_text:
            self._take(size)
            self._write('"')

    def _read_part(self) -> None:
        self._take(len(self._left) - len(self._left.lstrip()))
        if self._left.startswith(self._quote):
            self._take(len(self._quote))
            self._is_text = True
            self._write('"')
        elif self._quote.startswith(self._left):
            return
        elif self._left[0] in "{}[],:":
            self._read_sign(self._take(1))
        else:
            self._read_word()

    def _read_sign(self, sign: str) -> None:
        self._write(f"{sign} " if sign in ",:" else sign)
        if sign in "{[":
            self._open += sign
        elif sign in "}]":
            self._open = self._open[:-1]
        self._is_key = sign in "{," and self._open.endswith("{")
        if not self._open:
            self._end()

    def _read_word(self) -> None:
        found = _WORD.match(self._left)
        if found is None or found.end() == len(self._left):
            self.has_failed = len(self._left) > CALL_HEADER_CHARS_MAX
            return
        word = self._take(found.end()).strip()
        self._write(dumps(word, ensure_ascii=False) if self._is_key else _spelled(word))


def _spelled(word: str) -> str:
    """Spell a number or one of the few words in JSON; anything else is a text without its marks."""
    word = _PRINTED.get(word, word)
    try:
        loads(word, parse_constant=_no_json)
    except ValueError:
        return dumps(word, ensure_ascii=False)
    return word


def _no_json(word: str) -> Any:
    raise ValueError(word)
