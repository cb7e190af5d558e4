"""A node's use of its machine, and the end of its previous process."""

from dataclasses import dataclass, field
from typing import Final

from fabric.codec import left_out
from fabric.limits import EXIT_LINE_CHARS_MAX, EXIT_LINES_MAX

# Causes of an end.
STOPPED: Final = "stopped"  # on request
CRASHED: Final = "crashed"  # by a fatal signal of its own, or an error of its device
OUT_OF_MEMORY: Final = "out_of_memory"  # killed by the system
KILLED: Final = "killed"  # without a trace: by a signal, or with its machine


@dataclass(frozen=True, slots=True)
class UsageView:
    """Memory and disk of a node: in use and at most, in bytes; and its chip. None: not known."""

    process_bytes: int | None = None  # of RAM, resident
    arrays_bytes: int | None = None  # of MLX: weights, caches, and prefill under way
    pool_bytes: int | None = None  # freed arrays that MLX keeps
    share_bytes: int | None = None  # planned for arrays and pool
    weights_bytes: int | None = None
    machine_bytes: int | None = None  # RAM of the machine
    swap_bytes: int | None = None  # in use on the machine
    disk_limit_bytes: int | None = None  # budget for agents' caches on disk
    drive_bytes: int | None = None
    drive_free_bytes: int | None = None
    chip: str | None = field(default=None, metadata=left_out())  # the machine's processor


@dataclass(frozen=True, slots=True)
class ExitView:
    """End of the node's previous process."""

    at_s: float  # wall clock, when it is known to have run last
    cause: str
    detail: str  # in words
    lines: tuple[str, ...] = ()  # the last of its log, without texts of errors

    @classmethod
    def of(cls, at_s: float, cause: str, detail: str, lines: tuple[str, ...]) -> "ExitView":
        """Return the view with bounded lines."""
        kept = tuple(line[:EXIT_LINE_CHARS_MAX] for line in lines[-EXIT_LINES_MAX:])
        return cls(at_s, cause, detail[:EXIT_LINE_CHARS_MAX], kept)
