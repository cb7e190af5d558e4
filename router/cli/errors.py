"""What ends a command with a message instead of a traceback."""

FAILED = 1
MISUSED = 2


class CommandError(Exception):
    """The command cannot do what was asked; the message says why and what to do."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status
