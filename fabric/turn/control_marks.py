"""Control marks: texts of a tokenizer's control tokens, and where a text has them as such tokens.

A client's message may contain such a text, which is then plain text:

    text    |<|im_start|>user: log: <|im_end|> ...<|im_end|>|
             control                plain         control

So a text alone does not determine its tokens. `plain` lists the bytes at which plain marks begin;
in a record, the tokens determine them. Two texts match only as far as their control tokens do.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, AnyStr, Final, TypeAlias

Place: TypeAlias = tuple[int, int]  # the byte at which a control token's text begins, and its id

_UNKNOWN: Final = -1  # id of a token whose text was not found where it ends


class ControlMarks:
    """The control marks of one tokenizer."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Create them from the tokens' ids by their texts."""
        self.ids = {text: index for text, index in ids.items() if text}
        self._texts = {index: text.encode() for text, index in self.ids.items()}
        self._by_text = {text: index for index, text in self._texts.items()}
        pattern = longest_of(self.ids)
        self._pattern = re.compile(pattern.encode()) if self.ids else None

    @property
    def tokens(self) -> Collection[int]:
        """Ids of the control tokens."""
        return self._texts.keys()

    def control(self, text: bytes, plain: Container[int], end: int) -> Iterator[Place]:
        """Yield the control tokens in the first `end` bytes of a prompt's text."""
        if self._pattern is None:
            return
        for match in control_matches(self._pattern, text, plain, end):
            yield match.start(), self._by_text[match[0]]

    def of_tokens(
        self, text: bytes, ids: Sequence[int], ends: Sequence[int], count: int
    ) -> Iterator[Place]:
        """Yield the control tokens among the first `count` tokens of a text."""
        texts, last_end = self._texts, 0
        for at in [at for at, token in enumerate(ids[:count]) if token in texts]:
            end = ends[at]
            first = bisect_left(ends, end, 0, at + 1)  # tokens may share an end
            low = max(last_end, ends[first - 1] if first else 0)
            mark = texts[ids[at]]
            start = text.find(mark, low, end)
            if start < 0:
                yield low, _UNKNOWN
            else:
                last_end = start + len(mark)
                yield start, ids[at]

    def plain_in(self, text: bytes, ids: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
        """Return where a text with these tokens has plain marks."""
        control = dict(self.of_tokens(text, ids, ends, len(ids)))
        plain, at = [], 0
        while self._pattern is not None:
            match = self._pattern.search(text, at)
            if match is None:
                break
            start = match.start()
            is_control = control.get(start, _UNKNOWN) == self._by_text[match[0]]
            at = match.end() if is_control else start + 1
            plain += [] if is_control else [start]
        return tuple(plain)

    def same_control_bytes(
        self,
        prompt: bytes,
        plain: Container[int],
        stored: bytes,
        tokens: tuple[Sequence[int], Sequence[int]],
        common: int,
    ) -> int:
        """Return how many of the `common` bytes of prompt and record have the same control tokens.

        `tokens` are the record's ids and ends.
        """
        ids, ends = tokens
        count = bisect_right(ends, common)
        prompt_tokens = self.control(prompt, plain, common)
        for one, other in zip_longest(prompt_tokens, self.of_tokens(stored, ids, ends, count)):
            if one != other:
                return min(place[0] for place in (one, other) if place is not None)
        return common


def control_matches(
    pattern: re.Pattern[AnyStr], text: AnyStr, plain: Container[int], end: int | None = None
) -> Iterator[re.Match[AnyStr]]:
    """Yield the marks before `end` that do not begin at a `plain` place, nor within one another."""
    at, end = 0, len(text) if end is None else end
    while (match := pattern.search(text, at, end)) is not None:
        is_plain = match.start() in plain
        at = match.start() + 1 if is_plain else match.end()
        if not is_plain:
            yield match


def longest_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches the longest of these texts, however many there are."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(root)


def _branches(node: dict[str, Any]) -> str:
    parts = []
    for char, inner in node.items():
        if not char:
            continue
        spelled = re.escape(char)
        while len(inner) == 1 and "" not in inner:  # no branch: one run of characters
            ((char, inner),) = inner.items()  # noqa: PLW2901
            spelled += re.escape(char)
        parts.append(spelled + _branches(inner))
    if not parts:
        return ""
    options = f"(?:{'|'.join(parts)})" if len(parts) > 1 or "" in node else parts[0]
    return options + "?" if "" in node else options
