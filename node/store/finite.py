"""Are the numbers of a block numbers? A checksum says that bytes arrived, not what they mean.

A block that a node computed, or had from a peer that proved itself, is what a model made. One in a
hibernation file under a key of its own may be anything, and one infinite scale makes every
logit of its agent none at all. Read as integers: exponents that are all ones are no numbers.
"""

import numpy as np
from numpy.typing import NDArray

from fabric.errors import CorruptDataError
from fabric.kvcache.block_file import payload_tensors
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec

_EXPONENT_BITS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}


def require_finite(
    spec: ModelCacheSpec, group: CacheGroup, tokens_count: int, payload: memoryview
) -> None:
    """Raise CorruptDataError where a block's payload holds an infinity or no number."""
    at = 0
    for tensor in payload_tensors(spec, tokens_count, group):
        end = at + tensor.size_bytes
        bits = _EXPONENT_BITS.get(tensor.dtype)
        if bits is not None and _has(np.frombuffer(payload[at:end], np.uint8), bits):
            message = "a block holds numbers that are not finite"
            raise CorruptDataError(message)
        at = end


def _has(raw: NDArray[np.uint8], bits: int) -> bool:
    """Say whether in any of the numbers all of these bits are set."""
    if bits > np.iinfo(np.uint16).max:
        return bool(((raw.view(np.uint32) & np.uint32(bits)) == bits).any())
    return bool(((raw.view(np.uint16) & np.uint16(bits)) == bits).any())
