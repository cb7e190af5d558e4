"""Fields that say in every dialect how tokens are chosen, and where an answer ends."""

from collections.abc import Iterable
from typing import Any, Final

from router.http.fields import Fields, refuse, require_text
from router.limits import STOP_STRING_CHARS_MAX

_SEED_MIN, _SEED_MAX = -(1 << 63), (1 << 64) - 1
_TOP_P_MIN: Final = 1e-6  # clients may send 0, which keeps the likeliest token alone


def parse_temperature(fields: Fields, most: float) -> float:
    """Read the temperature, which is 1 where nothing is said."""
    value = fields.number("temperature", 0.0, most)
    return 1.0 if value is None else value


def parse_top_p(fields: Fields) -> float:
    """Read the mass of tokens to choose from."""
    value = fields.number("top_p", 0.0, 1.0)
    return 1.0 if value is None else max(_TOP_P_MIN, value)


def parse_seed(fields: Fields) -> int | None:
    """Read a seed."""
    return fields.integer("seed", _SEED_MIN, _SEED_MAX)


def stop_strings(items: Iterable[Any], param: str) -> tuple[str, ...]:
    """Check what ends an answer."""
    texts = tuple(require_text(item, param) for item in items)
    if not all(1 <= len(text) <= STOP_STRING_CHARS_MAX for text in texts):
        refuse(param, f"each has between 1 and {STOP_STRING_CHARS_MAX} characters")
    return texts
