"""Request of the command line to the simulator: plain data, which imports none of it."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """Options of `macfabric simulate`; an empty list means the default."""

    workloads: tuple[str, ...] = ()
    trace: str | None = None
    speedup: float = 1.0
    fleet: str = "four-unequal"
    policies: tuple[str, ...] = ()
    loads: tuple[float, ...] = ()
    seeds: int = 3
    first_seed: int = 1
    sessions: int | None = None
    size: float = 1.0  # of the sessions by workload
    link_mbit: float | None = None
    faults: tuple[str, ...] = ()
    wrong_speeds: str | None = None
    slow_links: float = 1.0
    html: str | None = None
    png: str | None = None
    json: bool = False
    listing: bool = False

    def as_plain(self) -> dict[str, Any]:
        """Return the options by name."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "SimulateRequest":
        """Return the request that `as_plain` has spelled, perhaps through JSON."""
        known = {field.name for field in fields(cls)}
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in plain.items()
            if name in known
        }
        return cls(**options)

    def command(self) -> str:
        """Return the command line that repeats this study, without its outputs."""
        default = SimulateRequest()
        words = ["macfabric simulate", *self.workloads]
        named = (
            *(("--policy", each) for each in self.policies),
            *(("--load", f"{each:g}") for each in self.loads),
            *(("--fault", each) for each in self.faults),
        )
        single = (
            "trace",
            "speedup",
            "fleet",
            "seeds",
            "first_seed",
            "sessions",
            "size",
            "link_mbit",
        )
        for name in (*single, "wrong_speeds", "slow_links"):
            value = getattr(self, name)
            if value != getattr(default, name):
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                words.append(f"--{name.replace('_', '-')} {shown}")
        return " ".join((*words, *(f"{name} {value}" for name, value in named)))
