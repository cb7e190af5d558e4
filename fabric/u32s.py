"""Long lists of token ids and offsets, four bytes a number instead of forty.

A record of 32k tokens is copied, compared, checked and packed with every turn: as Python
integers each of these passes touches two megabytes, as an array an eighth of one.
"""

import sys  # noqa: TID251 - its byte order is a constant
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from fabric.errors import CorruptDataError

ITEM_BYTES = 4
assert sys.byteorder == "little", "records are little-endian"
assert array("I").itemsize == ITEM_BYTES, "array('I') is 32 bits on every supported platform"


class U32s(Sequence[int]):
    """An immutable sequence of numbers below 2**32; slices and sums are of the same kind."""

    __slots__ = ("_items",)
    _items: "array[int]"

    def __init__(self, items: Iterable[int] = ()) -> None:
        """Copy `items`; raise CorruptDataError if one is out of range."""
        try:
            self._items = array("I", items)
        except OverflowError:
            message = "a token id or offset is out of range"
            raise CorruptDataError(message) from None

    @classmethod
    def unpack(cls, raw: bytes) -> "U32s":
        """Unpack the bytes of `pack`; raise CorruptDataError unless they are whole numbers."""
        if len(raw) % ITEM_BYTES:
            message = "the length of a token list is not a multiple of four bytes"
            raise CorruptDataError(message)
        numbers = cls()
        numbers._items = array("I", raw)
        return numbers

    def pack(self) -> bytes:
        """Return the numbers as little-endian u32."""
        return self._items.tobytes()

    def is_ascending(self) -> bool:
        """Return whether no number is smaller than the one before it."""
        import numpy as np  # takes a quarter of a second, which the command line avoids

        numbers = np.frombuffer(self._items, np.uint32) if self._items else np.empty(0, np.uint32)
        return bool((numbers[1:] >= numbers[:-1]).all())

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "U32s": ...
    def __getitem__(self, at: int | slice) -> "int | U32s":
        return _wrap_items(self._items[at]) if isinstance(at, slice) else self._items[at]

    def __add__(self, other: Iterable[int]) -> "U32s":
        return _wrap_items(self._items + array("I", other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, U32s):
            return self._items == other._items
        return isinstance(other, (tuple, list)) and self._items.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self._items))

    def __repr__(self) -> str:
        """Show the count alone: a prompt's tokens belong in no log."""
        return f"U32s({len(self)} numbers)"


def _wrap_items(items: "array[int]") -> U32s:
    numbers = U32s()
    numbers._items = items  # noqa: SLF001 - ours
    return numbers
