"""Tokens of a client as text, with the end of each one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
