"""Scanner that finds the end of a JSON value in streamed text."""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r'[^"{}\[\],\s]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')


class JsonScanner:
    """Scanner of one value; it looks at brackets and quotes only."""

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
        at = _match_end(_IN_STRING, text, at)
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
            return max(at + 1, _match_end(_BETWEEN, text, at))
        elif self._has_begun:  # a number or a word: only the next character ends it
            stop = _match_end(_PLAIN, text, at)
            self.has_ended = stop < len(text)
            return stop
        elif not char.isspace():
            self._has_begun = True
            return at
        return at + 1


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "the pattern matches an empty text"
    return match.end()
