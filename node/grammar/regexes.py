"""Regular expressions for grammars: of escaped text, and of text that does not contain a word.

To match escaped text, as in JSON strings, each character or class of an expression is replaced by
an expression of its escaped form. Characters that the format cannot express are dropped.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_CONTROLS: Final = "".join(map(chr, range(32)))
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]+)\}?")
_CLASSES: Final = (r"\d", r"\w", r"\s", r"\p")
_JSON: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\\": "\\", '"': '"'}
_PART: Final = re.compile(
    r"""(?P<group>\((?:\?(?P<flags>[ims]*(?:-[ims]+)?)(?P<scoped>[:)]))?)
    |(?P<count>\{\d+(?:,\d*)?\}[?+]?|[*+?][?+]?)
    |(?P<sign>[|)])
    |(?P<edge>\^|\$|\\[bBAzZG])
    |(?P<one>\.|\\(?:x[0-9A-Fa-f]{2}|[xuU]\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[pP](?:\{[^}]*\}|\w)|.)
        |\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[(])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class TextEscaping:
    """Escape sequences of a text format, and characters that must not occur unescaped."""

    escapes: Mapping[str, str] = field(default_factory=dict)
    forbidden: str = ""

    @property
    def special(self) -> str:
        """All characters that are not written as themselves."""
        return "".join(dict.fromkeys([*self.escapes, *self.forbidden]))


def json_escaping(escapes: str) -> TextEscaping:
    """Return the escaping of JSON strings, with these characters after a backslash."""
    pairs = {char: f"\\{sign}" for char, sign in _JSON.items() if sign in escapes}
    return TextEscaping(pairs, _CONTROLS + '"\\')


def escape_regex(regex: str, escaping: TextEscaping) -> str:
    """Return the expression that matches the escaped forms of the texts that `regex` matches.

    Raise ValueError for an invalid expression, and for anchors or lookaround.
    """
    return "".join(_RegexEscaper(escaping).parts(regex))


@dataclass(slots=True)
class _RegexEscaper:
    escaping: TextEscaping
    _flags: list[str] = field(default_factory=lambda: [""])
    _cache: dict[tuple[str, bool], str] = field(default_factory=dict)

    def parts(self, regex: str) -> Iterator[str]:
        at = 0
        while at < len(regex):
            part = _PART.match(regex, at)
            if part is None or part["edge"]:
                message = (
                    f"{regex[at : at + 8]!r} in a regular expression is not supported in tool calls"
                )
                raise ValueError(message)
            at = part.end()
            if part["one"]:
                yield self._one(part["one"])
            else:
                self._track_flags(part, regex[at : at + 1])
                yield part[0]

    def _track_flags(self, part: re.Match[str], following: str) -> None:
        """Update the stack of flags, one entry per open group."""
        if part["group"]:
            if part["group"] == "(" and following == "?":
                message = "lookaround in a regular expression is not supported in tool calls"
                raise ValueError(message)
            flags = self._flags[-1]
            added, _, removed = (part["flags"] or "").partition("-")
            flags = "".join({*flags, *added} - {*removed})
            if part["scoped"] == ")":
                self._flags[-1] = flags
            else:
                self._flags.append(flags)
        elif part["sign"] == ")" and len(self._flags) > 1:
            self._flags.pop()

    def _one(self, part: str) -> str:
        """Return the escaped form of one character or class, from the cache if it is there."""
        key = part, "s" in self._flags[-1]
        if key not in self._cache:
            self._cache[key] = self._escape(part)
        return self._cache[key]

    def _escape(self, part: str) -> str:
        code = _CODE.fullmatch(part)
        part = re.escape(chr(int(code[1], 16))) if code is not None else part
        if len(part) == 1 and part not in f".{self.escaping.special}":
            return part
        special = [char for char in self.escaping.special if self._matches(part, char)]
        is_class = part[0] in ".[" or part[:2].lower() in _CLASSES
        if not special and not is_class:
            return part
        escapes = self.escaping.escapes
        parts = [re.escape(escapes[char]) for char in special if char in escapes]
        if is_class and not (part[0] == "[" and self._is_all_special(part)):
            parts.insert(0, self._without_special(part))
        if not parts:
            message = f"the model's call format cannot express {(special or part)[0]!r}"
            raise ValueError(message)
        return f"(?:{'|'.join(parts)})"

    def _is_all_special(self, part: str) -> bool:
        """Return whether a class has special characters only; False if that is uncertain."""
        if part[1] == "^" or "\\" in part or not part.isascii():
            return False
        plain = (chr(code) for code in range(128) if chr(code) not in self.escaping.special)
        return not any(self._matches(part, char) for char in plain)

    def _without_special(self, part: str) -> str:
        """Return a class without its special characters."""
        special = "".join(f"\\x{ord(char):02X}" for char in self.escaping.special)
        if part == ".":
            return f"[^{special}]" if "s" in self._flags[-1] else f"[^\\n{special}]"
        return f"[{part}&&[^{special}]]"

    def _matches(self, part: str, char: str) -> bool:
        if part[0] == "[" and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", part[1:])):
            message = "nested character classes are not supported in tool calls"
            raise ValueError(message)
        flags = re.DOTALL if "s" in self._flags[-1] else re.NOFLAG
        try:
            return re.fullmatch(part, char, flags) is not None
        except re.error:  # Python lacks some notations, such as Unicode's classes
            return False


def exclude_word(word: str) -> str:
    """Return an expression that matches texts that do not contain `word`.

    If the word's first character occurs twice, as in `]]>`, the expression excludes its longest
    beginning or end in which it occurs once. The compiler can negate, but the states of a negation
    multiply with those of a length limit; this expression adds almost none. It tracks how much of
    the word has been read, and only the word's first character restarts that.
    """
    part = _unique_start(word)
    first, others = part[0], part[1:]
    if not others:
        return f"{_other_than(first)}*"
    read, broken = "", _other_than(first, others[-1])
    for char in reversed(others[:-1]):
        read = f"(?:{_escape_char(char)}{read})?"
        broken = f"(?:{_other_than(first, char)}|{_escape_char(char)}{broken})"
    begun = f"{_escape_char(first)}(?:{read}{_escape_char(first)})*"
    return f"(?:{_other_than(first)}|{begun}{broken})*(?:{begun}{read})?"


def _unique_start(word: str) -> str:
    """Return the word's longest beginning or end in which its first character occurs once."""
    again = word.find(word[0], 1)
    if again < 0:
        return word
    return max(word[:again], word[word.rindex(word[0]) :], key=len)


def _other_than(*chars: str) -> str:
    return f"[^{''.join(map(_escape_char, dict.fromkeys(chars)))}]"


def _escape_char(char: str) -> str:
    return "\\n" if char == "\n" else re.escape(char).replace("/", "\\/")
