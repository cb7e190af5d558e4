"""Cuts of a text into pieces that have the tokens of the whole.

Only at the start of a special token that no other can overlap: tokenizers find those first, in the
unmodified text, and later merges stop at them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

PIECE_CHARS: Final = 1 << 14  # preferred minimum: each piece costs a call


class TextPieces:
    """Cutter of texts for one tokenizer."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        """Create a cutter from the tokenizer's added tokens by id."""
        texts = [token.content for token in added.values()]
        self.ids = {
            token.content: index for index, token in added.items() if _is_sure(token, texts)
        }
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._begins = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the pieces, each with the id of its first token."""
        start, first = 0, None
        for found in self._begins.finditer(text) if self.ids else ():
            if found.start() - start >= PIECE_CHARS:
                yield text[start : found.start()], first
                start, first = found.start(), self.ids[found[0]]
        yield text[start:], first


def _is_sure(token: Any, texts: list[str]) -> bool:
    """Return whether this added token is recognized everywhere."""
    text = token.content
    if token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    if not text or text[0].isspace():  # a token that strips could remove it
        return False
    if any(text in other for other in texts if other != text):
        return False
    # No token, itself included, may begin before it and end within it.
    return not any(
        other.endswith(text[:size])
        for size in range(1, len(text))
        for other in texts
        if len(other) > size
    )
