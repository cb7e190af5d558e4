"""Where a text may be cut so that its pieces have the tokens of the whole.

Only where a special token begins that nothing else could cover: tokenizers find those first, in
the text as it is, and whatever merges afterwards stops at them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

PIECE_CHARS: Final = 1 << 14  # wished at least: each costs a call


class TextPieces:
    """Cuts texts for one tokenizer."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        """Take the tokenizer's added tokens by id."""
        texts = [token.content for token in added.values()]
        self.ids = {
            token.content: index for index, token in added.items() if _is_sure(token, texts)
        }
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._begins = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the pieces; with each, the id that its tokens must begin with."""
        start, first = 0, None
        for found in self._begins.finditer(text) if self.ids else ():
            if found.start() - start >= PIECE_CHARS:
                yield text[start : found.start()], first
                start, first = found.start(), self.ids[found[0]]
        yield text[start:], first


def _is_sure(token: Any, texts: list[str]) -> bool:
    """Say whether this added token is found wherever its text stands."""
    text = token.content
    if token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    if not text or text[0].isspace():  # one that strips could take it away
        return False
    if any(text in other for other in texts if other != text):
        return False
    # None may end inside of it that began before it, itself included.
    return not any(
        other.endswith(text[:size])
        for size in range(1, len(text))
        for other in texts
        if len(other) > size
    )
