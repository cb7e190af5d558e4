"""Spec file of a folder: the layout of its block files, written next to them.

So that a folder can be checked without loading the model that filled it.
"""

import re
from dataclasses import dataclass
from typing import Final

from fabric.codec import pack
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import Fingerprint, parse_fingerprint
from fabric.kvcache.cache_spec import (
    DTYPE_BYTES,
    NATIVE,
    WORD_BITS,
    ModelCacheSpec,
    SlotSpec,
    TensorSpec,
)
from fabric.kvcache.safetensors_header import DIM_MAX, DIMS_MAX
from fabric.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_TENSORS_MAX,
    BLOCK_TOKENS,
    LAYERS_MAX,
    SPEC_BYTES_MAX,
)
from fabric.record.envelope import Envelope

MAGIC: Final = b"MFSPEC01"
_NAME: Final = re.compile(r"[a-z][a-z0-9_.]{0,39}", re.ASCII)
_BITS: Final = frozenset({NATIVE, 2, 3, 4, 6, 8})
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SpecRecord:
    """Model of the blocks in a folder: its fingerprint, its name and its cache spec."""

    fingerprint: Fingerprint
    model: str
    spec: ModelCacheSpec


_ENVELOPE: Final = Envelope(SpecRecord, "cache spec", MAGIC, SPEC_BYTES_MAX)


def encode_spec(record: SpecRecord) -> bytes:
    """Serialize; raise CorruptDataError for a spec of which no block file could be written."""
    _check(record)
    return _ENVELOPE.seal(pack(record))


def decode_spec(raw: bytes) -> SpecRecord:
    """Parse what `encode_spec` wrote; raise CorruptDataError for anything else."""
    record = _ENVELOPE.open(raw)
    _check(record)
    return record


def _check(record: SpecRecord) -> None:
    problem = _problem(record)
    if problem:
        message = f"cache spec: {problem}"
        raise CorruptDataError(message)


def _problem(record: SpecRecord) -> str | None:
    try:
        parse_fingerprint(record.fingerprint)
    except RejectedError as error:
        return error.message
    layers = record.spec.layers
    if not 0 < len(layers) <= LAYERS_MAX or len(record.spec.nesting) > LAYERS_MAX:
        return f"it must have 1 to {LAYERS_MAX} layers"
    if not all(_is_slot(slot) for layer in layers for slot in layer.slots):
        return "blocks cannot hold one of its slots"
    if not all(_is_state(state) for layer in layers for state in layer.states):
        return "blocks cannot hold one of its states"
    return _group_problem(record.spec)


def _is_slot(slot: SlotSpec) -> bool:
    if not all(0 < size <= DIM_MAX for size in (slot.heads, slot.width)):
        return False
    if slot.bits not in _BITS or not 0 <= slot.group_size <= DIM_MAX:
        return False
    is_packed = slot.bits != NATIVE
    if is_packed and (not slot.group_size or slot.stored_width * slot.bits % WORD_BITS):
        return False
    return _NAME.fullmatch(slot.name) is not None and slot.dtype in DTYPE_BYTES


def _is_state(state: TensorSpec) -> bool:
    is_shape = len(state.shape) <= DIMS_MAX and all(0 < size <= DIM_MAX for size in state.shape)
    return is_shape and _NAME.fullmatch(state.name) is not None and state.dtype in DTYPE_BYTES


def _group_problem(spec: ModelCacheSpec) -> str | None:
    for group in spec.groups:
        tensors = spec.tensors(BLOCK_TOKENS, group)
        if len(tensors) > BLOCK_TENSORS_MAX:
            return f"a {group} block has too many tensors"
        if len({tensor.name for tensor in tensors}) != len(tensors):
            return "two tensors have the same name"
        kv_bytes = sum(tensor.size_bytes for tensor in tensors)
        if kv_bytes + BLOCK_TOKENS * _TOKEN_BYTES > BLOCK_BYTES_MAX:
            return f"a {group} block is over the limit"
    return None
