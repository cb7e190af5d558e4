"""Find where a JSON value ends that comes in parts."""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r'[^"{}\[\],\s]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')


class JsonValue:
    """One value; only its brackets and quotes are looked at."""

    def __init__(self) -> None:
        self.has_ended = False
        self.is_in_string = False
        self._is_escaped = False
        self._depth = 0
        self._has_begun = False

    def feed(self, text: str) -> int:
        """Return how many of the characters belong to the value."""
        at = 0
        while at < len(text) and not self.has_ended:
            at = self._in_string(text, at) if self.is_in_string else self._outside(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self.is_in_string = False
            self.has_ended = self._depth == 0
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self.is_in_string = self._has_begun = True
        elif char in "{[":
            self._depth += 1
            self._has_begun = True
        elif self._depth:
            if char in "}]":
                self._depth -= 1
                self.has_ended = self._depth == 0
                return at + 1
            return max(at + 1, _end(_BETWEEN, text, at))
        elif self._has_begun:  # a number or a word, which only what follows it ends
            stop = _end(_PLAIN, text, at)
            self.has_ended = stop < len(text)
            return stop
        elif not char.isspace():
            self._has_begun = True
            return at
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()
