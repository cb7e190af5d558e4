"""Layers of made-up models."""

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, SlotSpec


def attention_layer(
    kind: LayerKind,
    heads: int,
    widths: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    dtype: str,
    window_tokens: int = 0,
) -> LayerSpec:
    """Describe a layer with keys and values of these widths and one precision."""
    names = ("keys", "values")
    slots = tuple(
        SlotSpec(name, heads, width, bits, group_size, dtype)
        for name, width in zip(names, widths, strict=True)
    )
    return LayerSpec(kind, slots, window_tokens=window_tokens)
