"""Detection of NaN computed by a prompt or step, an error of the device, before anything is kept.

A NaN in any layer stays in a token's hidden state, so the last layer with a cache shows it. Layers
after that one affect only the logits, and store nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from node.mlx.device import DeviceError
from node.mlx.recurrent_layer import RecurrentLayer
from node.mlx.resident_layer import ResidentLayer


@contextmanager
def watch_nan(leaves: Iterable[Any]) -> Iterator[list[mx.array]]:
    """Collect whether values stored by the layers contain a NaN; nothing is evaluated yet."""
    found: list[mx.array] = []
    stored = [leaf for leaf in leaves if isinstance(leaf, ResidentLayer) and leaf.spec.slots]
    recurrent = [leaf for leaf in leaves if isinstance(leaf, RecurrentLayer)]
    for leaf in stored[-1:]:
        leaf.appended_nan = found
    try:
        yield found
    finally:
        for leaf in stored[-1:]:
            leaf.appended_nan = None
    for layer in recurrent[-1:]:
        found += [mx.isnan(array).any() for array in layer.cache if array is not None]


def refuse_nan(found: Iterable[mx.array], what: str) -> None:
    """Raise DeviceError if any of these flags is true."""
    if any(each.item() for each in found):
        message = f"{what} computed NaN"
        raise DeviceError(message)
