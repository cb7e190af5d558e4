"""Sampling defaults of omitted fields: from settings, from a model's own files, or built in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

FROM_SETTINGS: Final = "settings"
FROM_MODEL: Final = "generation_config.json"
BUILT_IN_SOURCE: Final = "built in"
BUILT_IN: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
TOP_K_MAX: Final = 1 << 31
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, TOP_K_MAX),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefault:
    """Default of one sampling field, and its origin."""

    field: str
    value: float
    source: str  # FROM_SETTINGS or FROM_MODEL


def describe_range(field: str) -> str:
    """Return the range of a field's values in words."""
    low, high = _RANGES[field]
    return f"must be {low:g} to {high:g}"


def in_range(field: str, value: Any) -> bool:
    """Return whether a field may have this value."""
    low, high = _RANGES[field]
    is_number = type(value) is int or (type(value) is float and isfinite(value))
    return is_number and low <= value <= high and (field != "top_k" or value == int(value))


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Read a model's `generation_config.json`; values that no request may have are left out.

    Source: `GenerationConfig` of transformers, where `do_sample: false` is greedy decoding.
    """
    defaults: dict[str, float] = {
        name: generation_config[name]
        for name in BUILT_IN
        if in_range(name, generation_config.get(name))
    }
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def merged_defaults(
    settings: Mapping[str, float | None], model: Mapping[str, float]
) -> tuple[SamplingDefault, ...]:
    """Return the defaults in force: settings replace the model's own."""
    values = {name: value for name, value in settings.items() if value is not None}
    return tuple(
        SamplingDefault(name, values[name], FROM_SETTINGS)
        if name in values
        else SamplingDefault(name, model[name], FROM_MODEL)
        for name in BUILT_IN
        if name in values or name in model
    )


def filled_in(left_out: frozenset[str], defaults: Iterable[SamplingDefault]) -> dict[str, Any]:
    """Return the default values of the fields that a request omits."""
    return {
        each.field: int(each.value) if each.field == "top_k" else float(each.value)
        for each in defaults
        if each.field in left_out and in_range(each.field, each.value)
    }


def left_out_fields(body: object) -> frozenset[str]:
    """Name the sampling fields that a request omits, or that its API lacks."""
    return frozenset(name for name in BUILT_IN if getattr(body, name, None) is None)


def chosen_or_built_in(body: object) -> dict[str, Any]:
    """Return the sampling fields of a request, with built-in values for those left out."""
    left_out = left_out_fields(body)
    return {
        name: value if name in left_out else getattr(body, name) for name, value in BUILT_IN.items()
    }
