"""A rate that follows what was measured lately."""

_OLD_WEIGHT = 0.8


class Speed:
    """Exponentially weighted units per second; 0 until something was measured."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def start(self, count: int, seconds: float) -> None:
        """Begin with one measurement in place of all earlier ones."""
        self.per_s = 0.0
        self.add(count, seconds)

    def add(self, count: int, seconds: float) -> None:
        if seconds <= 0:
            return
        rate = count / seconds
        self.per_s = _OLD_WEIGHT * self.per_s + (1 - _OLD_WEIGHT) * rate if self.per_s else rate
