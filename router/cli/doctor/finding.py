"""One thing that `macfabric config check` found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """One thing that is wrong (error) or will surprise (warning)."""

    level: str
    where: str
    message: str


def error(where: str, message: str) -> ConfigFinding:
    """Report what cannot work."""
    return ConfigFinding("error", where, message)


def warning(where: str, message: str) -> ConfigFinding:
    """Report what may not be meant, or cannot be known on this machine."""
    return ConfigFinding("warning", where, message)
