"""Cache spec: what one model keeps per token and layer, and its size in bytes.

Arrays and files are both laid out from it.

    layer   slots: vectors per token (keys, values, an index), 4-bit codes or native numbers
            states: arrays per sequence (recurrent layers), the same size at every length
    group   the layers stored together, because they are needed at the same times
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

from fabric.kvcache.rotation import Rotation
from fabric.limits import BLOCK_TOKENS

WORD_BITS = 32
NATIVE = 0  # bits of a slot whose numbers are kept as the model computes them


class LayerKind(StrEnum):
    """Kind of a layer's memory, which decides where its cache may be cut and reused."""

    FULL = "full"  # keys and values of every token
    WINDOW = "window"  # keys and values of the last tokens
    LATENT = "latent"  # a compressed latent and its rotated part: arithmetic on what is fetched
    INDEXED = "indexed"  # a latent, and an index that chooses which tokens are attended to
    RECURRENT = "recurrent"  # a state that has no tokens: nothing can be cut out of it


class CacheGroup(StrEnum):
    """Group of layers that are stored in one block file."""

    FULL = "full"  # needed from the first token on
    WINDOW = "window"  # needed for the last tokens only
    STATE = "state"  # needed at one exact point


_GROUP_OF_KIND = {LayerKind.WINDOW: CacheGroup.WINDOW, LayerKind.RECURRENT: CacheGroup.STATE}

# Names as safetensors spells them.
DTYPE_BYTES = {"U8": 1, "U32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4}


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
class SlotSpec:
    """Vectors `[heads, tokens, width]` that a layer keeps, quantized or native."""

    name: str
    heads: int
    width: int  # as the model computes it
    bits: int  # NATIVE: not quantized
    group_size: int
    dtype: str  # of scales and biases, or of the numbers themselves

    @property
    def stored_width(self) -> int:
        """Width with the zeros that fill the last quantization group."""
        if self.bits == NATIVE:
            return self.width
        return -(-self.width // self.group_size) * self.group_size

    def tensors(self, prefix: str, tokens_count: int) -> tuple[TensorSpec, ...]:
        """List this slot's tensors `[heads, tokens, …]` in file order."""
        name, lead = f"{prefix}.{self.name}", (self.heads, tokens_count)
        if self.bits == NATIVE:
            return (TensorSpec(name, self.dtype, (*lead, self.width)),)
        groups = self.stored_width // self.group_size
        words = self.stored_width * self.bits // WORD_BITS
        return (
            TensorSpec(f"{name}.codes", "U32", (*lead, words)),
            TensorSpec(f"{name}.scales", self.dtype, (*lead, groups)),
            TensorSpec(f"{name}.biases", self.dtype, (*lead, groups)),
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer."""

    kind: LayerKind
    slots: tuple[SlotSpec, ...] = ()
    states: tuple[TensorSpec, ...] = ()  # named state.0, state.1, …; `[1, …]`
    window_tokens: int = 0  # WINDOW only: a token attends to itself and window - 1 tokens before it
    is_chunked: bool = False  # attends only to those in its own chunk of window_tokens
    has_sinks: bool = False
    rotations: tuple[Rotation, ...] = ()  # where positions are written into the slots
    rotations_unknown: str = ""  # why the rotations are unknown; then rows must not be shifted

    @property
    def group(self) -> CacheGroup:
        """Group of layers that this layer is stored with."""
        return _GROUP_OF_KIND.get(self.kind, CacheGroup.FULL)

    @property
    def plain_bytes(self) -> int:
        """Bytes per token of its packed slots as plain numbers; 0 of a layer with a window."""
        if self.window_tokens:
            return 0
        packed = (slot for slot in self.slots if slot.bits != NATIVE)
        return sum(slot.heads * slot.width * DTYPE_BYTES[slot.dtype] for slot in packed)

    def tensors(self, layer_index: int, tokens_count: int) -> tuple[TensorSpec, ...]:
        """List this layer's tensors in file order; states do not depend on the tokens."""
        prefix = f"layers.{layer_index}"
        states = (TensorSpec(f"{prefix}.{s.name}", s.dtype, s.shape) for s in self.states)
        slots = (tensor for slot in self.slots for tensor in slot.tensors(prefix, tokens_count))
        return (*slots, *states)


class _Hashed:
    """Slot for a spec's hash: sizes and headers are looked up by it, several for each block.

    It is no field, so it is neither compared nor sent.
    """

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class ModelCacheSpec(_Hashed):
    """The cache of a whole model."""

    layers: tuple[LayerSpec, ...]
    # Per cache that the model makes: 0 for a plain one, n for a list of n, which are n layers here.
    nesting: tuple[int, ...] = ()
    sharing_count: int = 0  # attention layers that read another layer's cache

    def __post_init__(self) -> None:
        """Give every layer a cache of its own by default."""
        if not self.nesting:
            object.__setattr__(self, "nesting", (0,) * len(self.layers))

    def __hash__(self) -> int:
        """Return the hash of all compared fields, computed at the first call."""
        try:
            return self._hash
        except AttributeError:
            own_hash = hash((self.layers, self.nesting, self.sharing_count))
            object.__setattr__(self, "_hash", own_hash)
            return own_hash

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups that this model has."""
        present = {layer.group for layer in self.layers}
        return tuple(group for group in CacheGroup if group in present)

    @property
    def window_tokens(self) -> int:
        """The widest window of any layer; 0 without window layers."""
        return max((layer.window_tokens for layer in self.layers), default=0)

    def tensors(
        self, tokens_count: int, group: CacheGroup = CacheGroup.FULL
    ) -> tuple[TensorSpec, ...]:
        """List every cache tensor of a group's block of `tokens_count` tokens in file order."""
        return tuple(
            tensor
            for index, layer in enumerate(self.layers)
            if layer.group is group
            for tensor in layer.tensors(index, tokens_count)
        )

    def kv_bytes(self, tokens_count: int, group: CacheGroup = CacheGroup.FULL) -> int:
        """Bytes of a group's cache for `tokens_count` tokens."""
        if group is CacheGroup.STATE:
            return _unit_bytes(self, group)
        return tokens_count * _unit_bytes(self, group)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that every token costs in memory and on the wire, however long the context."""
        return self.kv_bytes(1)

    def resident_bytes(self, tokens_count: int) -> int:
        """Bytes in memory for an agent of `tokens_count` tokens; caches grow by whole blocks."""
        window_tokens = min(tokens_count, self.window_tokens)
        return (
            self.kv_bytes(-(-tokens_count // BLOCK_TOKENS) * BLOCK_TOKENS)
            + self.kv_bytes(-(-window_tokens // BLOCK_TOKENS) * BLOCK_TOKENS, CacheGroup.WINDOW)
            + self.kv_bytes(0, CacheGroup.STATE)
        )


@lru_cache(maxsize=32)
def _unit_bytes(spec: ModelCacheSpec, group: CacheGroup) -> int:
    """Bytes of one token, or of one state."""
    return sum(tensor.size_bytes for tensor in spec.tensors(1, group))
