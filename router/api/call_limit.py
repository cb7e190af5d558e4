"""How many calls of an answer a client takes: all, or with one at a time its first."""


class CallLimit:
    """Counts the calls of one streamed answer."""

    def __init__(self, *, takes_one: bool) -> None:
        self._left = 1 if takes_one else None

    def takes_next(self) -> bool:
        """Count a further call; say whether it is to be told."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0
