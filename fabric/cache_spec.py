"""What one model keeps per token and layer, and how many bytes that is.

Knows nothing of arrays or files: it is the shape from which both are laid out.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

WORD_BITS = 32


class LayerKind(StrEnum):
    """How a layer remembers: what decides where its cache may be cut and reused."""

    FULL = "full"


# Names as safetensors spells them.
DTYPE_BYTES = {"U8": 1, "U32": 4, "I32": 4, "F16": 2, "BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a block file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's contents."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The 4-bit cache of one layer; widths are head dims as stored (padding included)."""

    kind: LayerKind
    kv_heads: int
    key_width: int
    value_width: int
    bits: int
    group_size: int
    scale_dtype: str

    def tensors(self, layer_index: int, tokens_count: int) -> tuple[TensorSpec, ...]:
        """List this layer's six tensors `[kv_heads, tokens, width]` in file order."""
        out = []
        for slot, width in (("keys", self.key_width), ("values", self.value_width)):
            prefix = f"layers.{layer_index}.{slot}"
            lead = (self.kv_heads, tokens_count)
            groups = width // self.group_size
            out += [
                TensorSpec(f"{prefix}.codes", "U32", (*lead, width * self.bits // WORD_BITS)),
                TensorSpec(f"{prefix}.scales", self.scale_dtype, (*lead, groups)),
                TensorSpec(f"{prefix}.biases", self.scale_dtype, (*lead, groups)),
            ]
        return tuple(out)


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """The cache of a whole model, layer by layer."""

    layers: tuple[LayerSpec, ...]

    def tensors(self, tokens_count: int) -> tuple[TensorSpec, ...]:
        """List every cache tensor of a block of `tokens_count` tokens in file order."""
        return tuple(
            tensor
            for index, layer in enumerate(self.layers)
            for tensor in layer.tensors(index, tokens_count)
        )

    def kv_bytes(self, tokens_count: int) -> int:
        """Bytes of packed codes, scales and biases for `tokens_count` tokens."""
        return sum(tensor.size_bytes for tensor in self.tensors(tokens_count))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token costs in memory, on disk and on the wire."""
        return self.kv_bytes(1)
