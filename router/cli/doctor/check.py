"""One thing that `macfabric doctor` looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: `ok`, `warning` or `error`, and what was seen."""

    name: str
    verdict: str
    detail: str
