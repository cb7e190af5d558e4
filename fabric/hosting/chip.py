"""The name of this machine's processor."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

CPUINFO: Final = Path("/proc/cpuinfo")
BRAND_NAME: Final = b"machdep.cpu.brand_string"
_BRAND_CHARS_MAX: Final = 256


@cache
def chip_name(platform: str = sys.platform, cpuinfo: Path = CPUINFO) -> str | None:
    """Return the name, such as "Apple M4 Max", or None if the system reports none."""
    if platform == "darwin":
        return _read_brand()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or None


def _read_brand() -> str | None:
    read: Callable[..., int] = ctypes.CDLL(None).sysctlbyname
    text = ctypes.create_string_buffer(_BRAND_CHARS_MAX)
    size = ctypes.c_size_t(_BRAND_CHARS_MAX)
    failed = read(BRAND_NAME, text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else text.value.decode().strip() or None
