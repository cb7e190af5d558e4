"""Amounts as people write them: `8GiB`, `500 MB`, `90s`, `1h30m`."""

import re
from typing import Final

_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)(?:/s)?", re.ASCII | re.IGNORECASE)
_PREFIXES: Final = "kmgt"
_KIB: Final = 1024
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int | None:
    """Read a number of bytes with its unit; None for anything else."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    unit = match[2].lower()
    step = 1024 if "i" in unit else 1000
    power = _PREFIXES.find(unit[0]) + 1
    count = float(match[1]) if "." in match[1] else int(match[1])
    return int(count * step**power)


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit: `8.0 GiB`."""
    if count < _KIB:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= _KIB
        if count < _KIB:
            return f"{count:.1f} {unit}"
    return f"{count / _KIB:.1f} TiB"


def parse_seconds(text: str) -> float | None:
    """Read a duration with its units; None for anything else."""
    rest, total_s = text.strip(), 0.0
    while match := _PART.match(rest):
        total_s += float(match[1]) * _SECONDS[match[2].lower()]
        rest = rest[match.end() :]
    return total_s if text.strip() and not rest else None
