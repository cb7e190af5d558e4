"""An answer as a model writes it, and as a client receives it."""

from dataclasses import dataclass

LOOK = ("look", {"at": "the sky"})
BASH = ("bash", {"command": 'echo "</tool_call>"\n\tls {}', "timeout": 5})
NOW = ("now", {})


@dataclass(frozen=True)
class Case:
    """The text that a model writes, and the answer that a client receives."""

    says: str
    text: str = ""
    reasoning: str = ""
    calls: tuple = ()
    calls_as: str = "auto"
    thoughts_as: str = "auto"
    tail: str = ""
    ids: tuple | None = None
    broken: int = 0
    stop: tuple = ()
    stopped_by: str | None = None
    begun: tuple = ()  # a broken call: its name, and the arguments as far as they were read
