"""How far two texts agree, in bytes, without a Python loop over characters."""

_STRIDE_BYTES = 1 << 16


def common_prefix_bytes(a: bytes, b: bytes) -> int:
    """Count the leading bytes that `a` and `b` share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    at = 0
    while a[at : at + _STRIDE_BYTES] == b[at : at + _STRIDE_BYTES]:
        at += _STRIDE_BYTES
    low, high = at, min(at + _STRIDE_BYTES, limit)  # a[:low] agree; a[:high] do not
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_prefix_items(a: list[int], b: list[int]) -> int:
    """Count the leading items that two token lists share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
