"""The bytes of layers' arrays, in the order of a block file."""

from collections.abc import Iterable, Iterator

import numpy as np

from node.mlx.resident_layer import ResidentLayer
from node.store.staging import Place


def rows_of(leaves: Iterable[ResidentLayer]) -> list[Place]:
    """Return writable views of the layers' arrays `[kv_heads, capacity, bytes]` in file order."""
    return [
        np.frombuffer(view, np.uint8).reshape(heads, capacity, -1)
        for view, heads, capacity in _own_heads(leaves)
    ]


def _own_heads(leaves: Iterable[ResidentLayer]) -> Iterator[tuple[memoryview, int, int]]:
    """Yield each array's own heads as (bytes, kv_heads, capacity)."""
    for leaf in leaves:
        for array, heads in leaf.slots():
            capacity = array.shape[2]
            view = memoryview(array).cast("B")
            head_bytes = len(view) // array.shape[1]
            part = view[heads.start * head_bytes : heads.stop * head_bytes]
            yield part, heads.stop - heads.start, capacity
