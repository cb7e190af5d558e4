"""Regular expressions of texts that are written otherwise than they read: within JSON, for example.

Each character of an expression, and each class of them, becomes what stands for it; what is around
them stays. What cannot be written is left out, so that what fits is always a text that was meant.
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
class TextSpelling:
    """How characters are written: some by others, and some not at all."""

    written: Mapping[str, str] = field(default_factory=dict)
    never: str = ""

    @property
    def odd(self) -> str:
        """All characters that are not written as they are."""
        return "".join(dict.fromkeys([*self.written, *self.never]))


def json_text(escapes: str) -> TextSpelling:
    """Return how a text is written between quotes in JSON that knows these escapes."""
    written = {char: f"\\{sign}" for char, sign in _JSON.items() if sign in escapes}
    return TextSpelling(written, _CONTROLS + '"\\')


def respelled(regex: str, spelling: TextSpelling) -> str:
    """Return the expression of what is written for the texts of `regex`.

    Raise ValueError where it looks around, or is none.
    """
    return "".join(_Respelling(spelling).parts(regex))


@dataclass(slots=True)
class _Respelling:
    spelling: TextSpelling
    _flags: list[str] = field(default_factory=lambda: [""])
    _made: dict[tuple[str, bool], str] = field(default_factory=dict)

    def parts(self, regex: str) -> Iterator[str]:
        at = 0
        while at < len(regex):
            found = _PART.match(regex, at)
            if found is None or found["edge"]:
                message = f"{regex[at : at + 8]!r} in an expression is not enforced in a call"
                raise ValueError(message)
            at = found.end()
            if found["one"]:
                yield self._one(found["one"])
            else:
                self._note(found, regex[at : at + 1])
                yield found[0]

    def _note(self, found: re.Match[str], following: str) -> None:
        """Keep which flags hold within the groups that are open."""
        if found["group"]:
            if found["group"] == "(" and following == "?":
                message = "a regular expression that looks around is not enforced in a call"
                raise ValueError(message)
            flags = self._flags[-1]
            added, _, removed = (found["flags"] or "").partition("-")
            flags = "".join({*flags, *added} - {*removed})
            if found["scoped"] == ")":
                self._flags[-1] = flags
            else:
                self._flags.append(flags)
        elif found["sign"] == ")" and len(self._flags) > 1:
            self._flags.pop()

    def _one(self, part: str) -> str:
        """Spell one character, or a class of them."""
        key = part, "s" in self._flags[-1]
        if key not in self._made:
            self._made[key] = self._spelled(part)
        return self._made[key]

    def _spelled(self, part: str) -> str:
        code = _CODE.fullmatch(part)
        part = re.escape(chr(int(code[1], 16))) if code is not None else part
        if len(part) == 1 and part not in f".{self.spelling.odd}":
            return part
        odd = [char for char in self.spelling.odd if self._fits(part, char)]
        is_class = part[0] in ".[" or part[:2].lower() in _CLASSES
        if not odd and not is_class:
            return part
        written = self.spelling.written
        parts = [re.escape(written[char]) for char in odd if char in written]
        if is_class and not (part[0] == "[" and self._is_odd(part)):
            parts.insert(0, self._plain(part))
        if not parts:
            message = f"{(odd or part)[0]!r} cannot be written in this model's format"
            raise ValueError(message)
        return f"(?:{'|'.join(parts)})"

    def _is_odd(self, part: str) -> bool:
        """Say whether a class has nothing that is written as it is; of some that is not seen."""
        if part[1] == "^" or "\\" in part or not part.isascii():
            return False
        plain = (chr(code) for code in range(128) if chr(code) not in self.spelling.odd)
        return not any(self._fits(part, char) for char in plain)

    def _plain(self, part: str) -> str:
        """Leave of a class what is written as it is."""
        none = "".join(f"\\x{ord(char):02X}" for char in self.spelling.odd)
        if part == ".":
            return f"[^{none}]" if "s" in self._flags[-1] else f"[^\\n{none}]"
        return f"[{part}&&[^{none}]]"

    def _fits(self, part: str, char: str) -> bool:
        if part[0] == "[" and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", part[1:])):
            message = "a class of characters within another is not enforced in a call"
            raise ValueError(message)
        flags = re.DOTALL if "s" in self._flags[-1] else re.NOFLAG
        try:
            return re.fullmatch(part, char, flags) is not None
        except re.error:  # a notation that Python lacks, such as that of Unicode's classes
            return False
