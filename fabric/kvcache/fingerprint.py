"""Fingerprint of a model's caches: one digest of everything that decides their bits.

Block names, block headers and records all contain it, so it must never change. The names that
spell a cache's layout are therefore fixed here, next to the field that each is read from: classes
and fields may be renamed, these words may not. Version 1 spells it as
Python printed the classes of the first release, whose stores stay readable.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from fabric.ids import FINGERPRINT_BYTES, Fingerprint
from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec, SlotSpec, TensorSpec
from fabric.kvcache.rotation import Rotation

# Raise it with any change of the words below: folders of the version before then wait like those
# of another model. A new field needs no new version if its default is left out.
LAYOUT_VERSION = 1

_Words = tuple[tuple[str, Callable[[Any], object]], ...]

_TENSOR: Final[_Words] = (
    ("name", lambda tensor: tensor.name),
    ("dtype", lambda tensor: tensor.dtype),
    ("shape", lambda tensor: tensor.shape),
)
_SLOT: Final[_Words] = (
    ("name", lambda slot: slot.name),
    ("heads", lambda slot: slot.heads),
    ("width", lambda slot: slot.width),
    ("bits", lambda slot: slot.bits),
    ("group_size", lambda slot: slot.group_size),
    ("dtype", lambda slot: slot.dtype),
)
_ROTATION: Final[_Words] = (
    ("slot", lambda rotation: rotation.slot),
    ("start", lambda rotation: rotation.start),
    ("dims", lambda rotation: rotation.dims),
    ("traditional", lambda rotation: rotation.traditional),
    ("base", lambda rotation: rotation.base),
    ("scale", lambda rotation: rotation.scale),
    ("frequencies", lambda rotation: rotation.frequencies),
)
_LAYER: Final[_Words] = (
    ("kind", lambda layer: layer.kind),
    ("slots", lambda layer: layer.slots),
    ("states", lambda layer: layer.states),
    ("window_tokens", lambda layer: layer.window_tokens),
    ("is_chunked", lambda layer: layer.is_chunked),
    ("has_sinks", lambda layer: layer.has_sinks),
    ("rotations", lambda layer: layer.rotations),
    ("rotations_unknown", lambda layer: layer.rotations_unknown),
)
_MODEL: Final[_Words] = (
    ("layers", lambda model: model.layers),
    ("nesting", lambda model: model.nesting),
    ("sharing_count", lambda model: model.sharing_count),
)
WORDS: Final[dict[type, tuple[str, _Words]]] = {
    TensorSpec: ("TensorSpec", _TENSOR),
    SlotSpec: ("SlotSpec", _SLOT),
    Rotation: ("Rotation", _ROTATION),
    LayerSpec: ("LayerSpec", _LAYER),
    ModelCacheSpec: ("ModelCacheSpec", _MODEL),
}
KIND_WORDS: Final = {
    LayerKind.FULL: "<LayerKind.FULL: 'full'>",
    LayerKind.WINDOW: "<LayerKind.WINDOW: 'window'>",
    LayerKind.LATENT: "<LayerKind.LATENT: 'latent'>",
    LayerKind.INDEXED: "<LayerKind.INDEXED: 'indexed'>",
    LayerKind.RECURRENT: "<LayerKind.RECURRENT: 'recurrent'>",
}
_PLAIN: Final = frozenset({bool, float, int, str, type(None)})


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a model's weights, and what is in it."""

    name: str
    size_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class TextFile:
    """File next to the weights that changes the tokens of a prompt."""

    name: str
    checksum: bytes


def model_fingerprint(
    weights: Iterable[WeightFile], texts: Iterable[TextFile], spec: ModelCacheSpec, numerics: str
) -> Fingerprint:
    """Digest a model's files, its caches' layout, and what computes them, each in its order."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"mf-fingerprint")
    for weight in weights:
        digest.update(f"{weight.name}:{weight.size_bytes}:".encode() + weight.checksum)
    for text in texts:
        digest.update(f"{text.name}:".encode() + text.checksum)
    digest.update(layout_text(spec).encode())
    digest.update(numerics.encode())
    return Fingerprint(digest.digest())


def layout_text(spec: ModelCacheSpec) -> str:
    """Spell a cache's layout; equal texts are equal layouts."""
    version = "" if LAYOUT_VERSION == 1 else f"{LAYOUT_VERSION}:"  # the first had no number
    return version + _spell_value(spec)


def _spell_value(value: object) -> str:
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if isinstance(value, LayerKind):
        return KIND_WORDS[value]
    if isinstance(value, tuple):
        items = ", ".join(map(_spell_value, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    name, words = WORDS[kind]
    return f"{name}({', '.join(f'{word}={_spell_value(read(value))}' for word, read in words)})"
