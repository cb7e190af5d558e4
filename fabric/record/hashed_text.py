"""Hash of a text that a directive removes, to find the text again without storing it.

A record must not keep a text that it must forget. So it keeps the text's length, a digest, and 16
bits of a rolling hash that finds the few places where the digest has to be compared.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from fabric.limits import DIRECTED_TEXT_CHARS_MAX

_DIGEST_BYTES: Final = 16
_BASE: Final = 0x9E37_79B9_7F4A_7C15  # odd, so that it has an inverse
_INVERSE: Final = pow(_BASE, -1, 1 << 64)
_KEPT_BITS: Final = 16  # of the rolling hash: too few to compute the text from


@dataclass(frozen=True, slots=True)
class HashedText:
    """Digest, length and rolling hash of a text."""

    chars: int
    hint: int  # the upper bits of its rolling hash
    digest: bytes

    @property
    def is_valid(self) -> bool:
        """Return whether the values are in range."""
        in_range = 0 < self.chars <= DIRECTED_TEXT_CHARS_MAX and 0 <= self.hint < 1 << _KEPT_BITS
        return in_range and len(self.digest) == _DIGEST_BYTES


def hash_text(text: str) -> HashedText:
    """Hash a text."""
    return HashedText(len(text), int(_hints(text, len(text))[0]), _digest(text))


def text_places(wanted: HashedText, text: str) -> list[int]:
    """List the positions at which the wanted text starts, without overlaps."""
    if wanted.chars > len(text):
        return []
    positions: list[int] = []
    for at in np.flatnonzero(_hints(text, wanted.chars) == wanted.hint).tolist():
        is_free = not positions or at >= positions[-1] + wanted.chars
        if is_free and _digest(text[at : at + wanted.chars]) == wanted.digest:
            positions.append(at)
    return positions


def replace_text(wanted: HashedText, text: str, replacement: str) -> str:
    """Return a text with every occurrence of the wanted one replaced."""
    for at in reversed(text_places(wanted, text)):
        text = text[:at] + replacement + text[at + wanted.chars :]
    return text


def _digest(text: str) -> bytes:
    spelled = text.encode("utf-8", "surrogatepass")
    return blake2b(spelled, digest_size=_DIGEST_BYTES, person=b"mf-sought").digest()


def _hints(text: str, size: int) -> npt.NDArray[np.uint64]:
    """Hash each run of `size` characters."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    powers = np.full(len(codes) + 1, _BASE, np.uint64)
    inverses = np.full(len(codes) + 1, _INVERSE, np.uint64)
    powers[0] = inverses[0] = 1
    powers, inverses = np.cumprod(powers), np.cumprod(inverses)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + 1) * powers[:-1])])
    count = len(codes) - size + 1
    hashes = (sums[size:] - sums[:count]) * inverses[:count] * np.uint64(_BASE)
    hints: npt.NDArray[np.uint64] = hashes >> np.uint64(64 - _KEPT_BITS)
    return hints
