"""Common prefix of two texts or token lists, without a Python loop over their items."""

from typing import TypeVar

_STRIDE = 1 << 16

Items = TypeVar("Items", str, bytes, list[int])


def common_prefix(a: Items, b: Items) -> int:
    """Count the leading characters, bytes or tokens that `a` and `b` share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    at = 0
    while a[at : at + _STRIDE] == b[at : at + _STRIDE]:
        at += _STRIDE
    low, high = at, min(at + _STRIDE, limit)  # a[:low] agree; a[:high] do not
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
