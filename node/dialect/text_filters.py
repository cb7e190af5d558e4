"""Filters of streamed text: find marks, stop at stop strings, drop line ends beside marks.

Text arrives in pieces. Each filter holds back the end of a piece that may be the beginning of a
mark or a stop string.
"""

import re
from functools import lru_cache


class Marks:
    """Set of marks, none of which contains another."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        nested = [(a, b) for a in texts for b in texts if a != b and a in b]
        assert not nested, f"a mark within a mark is found too early or too late: {nested}"
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._longest = max(map(len, texts), default=0)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Return the text before the first mark, the mark, and the rest.

        Without a mark, the rest is what may be the beginning of one.
        """
        if self._pattern is None:
            return text, None, ""
        match = self._pattern.search(text)
        if match is not None:
            return text[: match.start()], match[0], text[match.end() :]
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
def compile_marks(texts: tuple[str, ...]) -> Marks:
    """Return the set of these marks, compiled once."""
    return Marks(texts)


class StopStrings:
    """Filter that ends the text at the first complete stop string."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._longest = max(map(len, self._texts), default=0)
        self._held = ""
        self.matched: str | None = None

    def reset(self) -> None:
        """Discard the text read so far."""
        self._held, self.matched = "", None

    def feed(self, text: str) -> str:
        """Return the text that is certain to come before any stop string."""
        if not self._texts:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        ends = [
            (self._held.find(stop) + len(stop), -len(stop), stop)
            for stop in self._texts
            if stop in self._held
        ]
        if ends:
            end, _, self.matched = min(ends)
            shown, self._held = self._held[: end - len(self.matched)], ""
            return shown
        at = len(self._held) - held_chars(self._held, self._texts, self._longest)
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def flush(self) -> str:
        """Return the held text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


class LineEndFilter:
    """Filter that drops the line ends beside marks: the template's, not the model's text."""

    def __init__(self, *, has_marks: bool) -> None:
        """Pass all text through unless it `has_marks`."""
        self._has_marks = has_marks
        self._is_after_mark = False
        self._has_text = False
        self._held = ""  # line ends that a mark may follow
        self._cut = ""  # line ends before the last mark

    def reset(self) -> None:
        """Forget the text, but not whether a mark was met."""
        self._has_text, self._held, self._cut = False, "", ""

    def strip_after_mark(self, text: str) -> str:
        """Return the text without the line ends that follow a mark."""
        if not self._is_after_mark:
            return text
        text = text.lstrip("\n")
        self._is_after_mark = not text
        return text

    def feed(self, text: str) -> str:
        """Return the text without the line ends that a mark may follow."""
        if not self._has_marks or not text:
            return text
        if self._cut:  # between two texts, line ends are the model's
            text, self._cut = self._cut + text, ""
        body = text.rstrip("\n")
        if not body:
            self._held += text
            return ""
        shown, self._held = self._held + body, text[len(body) :]
        self._has_text = True
        return shown

    def meet_mark(self) -> None:
        """Drop the line ends beside a mark, unless text follows."""
        if not self._is_after_mark:
            self._cut = (self._held or "\n") if self._has_text else ""
        self._held = ""
        self._is_after_mark = True

    def restore_mark(self, text: str) -> str:
        """Return the text of a mark that turned out to be plain text."""
        self._is_after_mark, self._cut = False, ""
        self._has_text = True
        return text

    def flush(self) -> str:
        """Return the held line ends, which no mark followed."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> str:
        """Line ends that a mark may follow."""
        return self._held
