"""Tokens as text: where each ends, where a text can be cut, and how many bytes one may spell.

A long text is cut into pieces that have the tokens of the whole: only at the start of a special
token that no other can overlap. Tokenizers find those first, in the unmodified text, and later
merges stop at them.

The maximal bytes of text per token follow from a tokenizer's steps: a prompt that cannot fit the
context is refused by its size, unread. A step that may drop text, or is unknown, allows any amount
of text per token.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

from node.limits import CHARACTER_TOKENS_MAX

_CUT: Final = "\N{REPLACEMENT CHARACTER}"  # a token ends within a character


@dataclass(frozen=True, slots=True)
class SpelledTokens:
    """A text, and the end in bytes of each token's part."""

    text: str
    ends: list[int]


def spell(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> SpelledTokens:
    """Decode tokens in context, as spaces and bytes may depend on earlier ones."""
    parts: list[str] = []
    ends: list[int] = []
    known = begun = size_bytes = 0  # tokens known[…]begun are spelled, and context for the next
    for at in range(1, len(ids) + 1):
        before = decode(ids[known:begun])
        part = decode(ids[known:at])[len(before) :]
        is_cut = part.endswith(_CUT) and at - begun < CHARACTER_TOKENS_MAX
        if at < len(ids) and is_cut:
            continue
        parts.append(part)
        ends += [size_bytes] * (at - begun - 1)
        size_bytes += len(part.encode())
        ends.append(size_bytes)
        known, begun = begun, at
    return SpelledTokens("".join(parts), ends)


def char_places(text: str, places: Sequence[int]) -> list[int]:
    """Return the characters that begin at these bytes of a text."""
    if text.isascii() or not places:
        return list(places)
    raw, at, done, char_starts = text.encode("utf-8", "replace"), 0, 0, []
    for place in places:
        at, done = at + len(raw[done:place].decode("utf-8", "replace")), place
        char_starts.append(at)
    return char_starts


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

    def cut(self, text: str, plain: Container[int] = ()) -> Iterator[tuple[str, int | None]]:
        """Yield the pieces, each with the id of its first token.

        The texts of tokens that begin at the characters `plain` are no tokens.
        """
        start, first = 0, None
        for match in self._begins.finditer(text) if self.ids else ():
            if match.start() - start >= PIECE_CHARS and match.start() not in plain:
                yield text[start : match.start()], first
                start, first = match.start(), self.ids[match[0]]
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


# Bytes of a text per byte that is left: a test measures them over all of Unicode.
_SHRINKING: Final[Mapping[str, float]] = {
    "ByteLevel": 1,
    "Lowercase": 3,
    "NFC": 4,
    "NFD": 3,
    "NFKC": 4,
    "NFKD": 4,
    "Prepend": 1,
}
_KEEPING: Final = frozenset({"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"})
_CUTTING: Final = frozenset({"Punctuation", "Split"})  # keep text, unless set to remove it
_CHAR_BYTES_MAX: Final = 4
_BYTES: Final = range(256)


def token_reach_bytes(tokenizer: Any) -> int | None:
    """Return the maximal bytes of text in one token of a fast tokenizer; None: unbounded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = tokenizer.added_tokens_decoder.values()
    cutters = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    shrinks = [_shrinking(part) for part in _parts(backend.normalizer, "normalizers")]
    is_kept = (
        not any(token.lstrip or token.rstrip for token in added)
        and all(_keeps(part) for part in cutters)
        and _knows_every_byte(backend.model, cutters)
    )
    if not is_kept or inf in shrinks:
        return None
    # A token's spelling in the vocabulary has at least the bytes of its text.
    reach_bytes = max(len(text.encode("utf-8", "replace")) for text in tokenizer.get_vocab())
    for factor in shrinks:
        reach_bytes *= ceil(factor)
    return max(reach_bytes, _CHAR_BYTES_MAX)


def _parts(part: Any, of_sequence: str) -> Iterator[dict[str, Any]]:
    """Yield a normalizer's or pre-tokenizer's steps in the form of tokenizer.json."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            stack.extend(step[of_sequence])
        else:
            yield step


def _shrinking(step: Mapping[str, Any]) -> float:
    """Return the bytes of a text that may become one; infinite if text may be dropped."""
    if step["type"] != "Replace":
        return _SHRINKING.get(step["type"], inf)
    pattern, content = step["pattern"].get("String", ""), step["content"]
    if not pattern or not content:
        return inf
    return max(1.0, len(pattern.encode()) / len(content.encode()))


def _keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] in _CUTTING:
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING


def _knows_every_byte(model: Any, cutters: list[dict[str, Any]]) -> bool:
    """Return whether a model drops nothing, and never fuses unknown characters into one token."""
    if type(model).__name__ != "BPE":
        return False
    if any(step["type"] == "ByteLevel" for step in cutters):
        return all(model.token_to_id(letter) is not None for letter in _byte_letters())
    if model.byte_fallback and all(model.token_to_id(f"<0x{b:02X}>") is not None for b in _BYTES):
        return True
    return model.unk_token is not None and not model.fuse_unk


def _byte_letters() -> Iterator[str]:
    """Yield the characters by which byte-level vocabularies spell bytes."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    yield from map(chr, sorted(own))
    yield from (chr(0x100 + index) for index in range(len(_BYTES) - len(own)))
