"""Pace of an arriving body, judged over all of it, so that sending single bytes gains no time."""

from dataclasses import dataclass, field

from fabric.errors import StalledError


@dataclass(slots=True)
class Pace:
    """Bytes received of a body and the seconds spent waiting for them; the reader has the clock."""

    bytes_per_s: float
    grace_s: float
    _bytes_count: int = field(default=0, init=False)
    _waited_s: float = field(default=0.0, init=False)

    @property
    def left_s(self) -> float:
        """Seconds within which more must arrive."""
        allowed_s = self.grace_s + self._bytes_count / self.bytes_per_s
        return max(0.0, allowed_s - self._waited_s)

    def add(self, bytes_count: int, waited_s: float) -> None:
        """Count received bytes, and the seconds spent waiting for the sender."""
        self._bytes_count += bytes_count
        self._waited_s += waited_s

    def stalled_error(self) -> StalledError:
        """Return the error for a body that is too slow."""
        return StalledError(
            f"{self._bytes_count} bytes of the body came in {self._waited_s + self.left_s:.0f} s: "
            f"it has {self.grace_s:g} s, and one more for every {self.bytes_per_s:g} bytes"
        )
