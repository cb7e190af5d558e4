"""Waits before retries: twice as long each time, up to a limit."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BackOff:
    """Waits between the retries of one operation."""

    first_s: float
    longest_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self.longest_s)
        return wait_s
