"""Results of `macfabric doctor` and `config check`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: `ok`, `warning` or `error`, and the details."""

    name: str
    verdict: str
    detail: str


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """One setting that is wrong (error) or likely unintended (warning)."""

    level: str
    where: str
    message: str


def error(where: str, message: str) -> ConfigFinding:
    """Return a finding for a setting that cannot work."""
    return ConfigFinding("error", where, message)


def warning(where: str, message: str) -> ConfigFinding:
    """Return a finding for a setting that may be unintended, or cannot be checked here."""
    return ConfigFinding("warning", where, message)
