"""Find marks in a text that comes in parts, holding back what may become one."""

import re
from functools import lru_cache


class Marks:
    """Some marks, none of which is part of another."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        inside = [(a, b) for a in texts for b in texts if a != b and a in b]
        assert not inside, f"a mark within a mark is found too early or too late: {inside}"
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._longest = max(map(len, texts), default=0)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Return what is in front of the first mark, the mark, and what is left to look at.

        Without a mark, what is left may be the beginning of one.
        """
        if self._pattern is None:
            return text, None, ""
        found = self._pattern.search(text)
        if found is not None:
            return text[: found.start()], found[0], text[found.end() :]
        at = len(text) - held_chars(text, self._texts, self._longest)
        return text[:at], None, text[at:]


def held_chars(text: str, marks: tuple[str, ...], longest: int) -> int:
    """Count the characters at a text's end that one of the marks may begin with."""
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


@lru_cache(maxsize=256)
def marks_of(texts: tuple[str, ...]) -> Marks:
    """Compile each set once."""
    return Marks(texts)
