"""How many bytes of a text one token stands for at most, read off a tokenizer's own parts.

A prompt is refused unread where no tokens could hold it. Whatever may drop text on its way to
tokens, or is not known here, makes one token stand for any amount of it.
"""

import json
from collections.abc import Iterator, Mapping
from math import ceil, inf
from typing import Any, Final

# Bytes of a text for each one that is left of it: measured over all of Unicode by a test.
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
_CUTTING: Final = frozenset({"Punctuation", "Split"})  # keep all, unless told to remove
_CHAR_BYTES_MAX: Final = 4
_BYTES: Final = range(256)


def token_reach_bytes(tokenizer: Any) -> int | None:
    """Return the bytes of text that one token of a fast tokenizer may hold; None: any number."""
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
    # Spelled in the vocabulary, no token has fewer bytes than in a text.
    reach_bytes = max(len(text.encode("utf-8", "replace")) for text in tokenizer.get_vocab())
    for factor in shrinks:
        reach_bytes *= ceil(factor)
    return max(reach_bytes, _CHAR_BYTES_MAX)


def _parts(part: Any, of_sequence: str) -> Iterator[dict[str, Any]]:
    """Yield a normalizer's or pre-tokenizer's steps as the tokenizer's own file spells them."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            stack.extend(step[of_sequence])
        else:
            yield step


def _shrinking(step: Mapping[str, Any]) -> float:
    """Say how many bytes of a text may become one; infinite where text may go."""
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
    """Say whether a model drops nothing, and makes no single token of a run of unknown letters."""
    if type(model).__name__ != "BPE":
        return False
    if any(step["type"] == "ByteLevel" for step in cutters):
        return all(model.token_to_id(letter) is not None for letter in _byte_letters())
    if model.byte_fallback and all(model.token_to_id(f"<0x{b:02X}>") is not None for b in _BYTES):
        return True
    return model.unk_token is not None and not model.fuse_unk


def _byte_letters() -> Iterator[str]:
    """Yield the letters by which byte-level vocabularies spell bytes, of which some need others."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    yield from map(chr, sorted(own))
    yield from (chr(0x100 + index) for index in range(len(_BYTES) - len(own)))
