"""What a node takes, what it keeps, and what is wrong with it now."""

from dataclasses import dataclass, field

from fabric.control.node_calls import DRAINING, READY
from fabric.errors import RetryElsewhereError, RetryLaterError
from fabric.ids import NodeName
from node.runtime.one_loop import of_one_loop

NOT_ERASED = "an erasure is not complete on the disk"


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class Health:
    """Health of a node; used on its event loop."""

    name: NodeName
    problem: str | None = None  # why no agent's cache is kept: every prompt is computed whole
    is_draining: bool = False  # no new agents: somebody said so
    is_stopping: bool = False
    owes_erasure: bool = False  # the disk refused a part of one, and has not taken it since
    troubles: dict[str, str] = field(default_factory=dict)  # what is wrong now, by its cause
    failed_rounds: int = 0  # of background work

    @property
    def reuses(self) -> bool:
        """Say whether caches are kept and reused."""
        return self.problem is None

    @property
    def degraded(self) -> str | None:
        """Say in words what is wrong now, to whoever asks for the node's health."""
        owed = [NOT_ERASED] if self.owes_erasure else []
        return "; ".join([*self.troubles.values(), *owed]) or None

    @property
    def state(self) -> str:
        """Say in a word what the node takes."""
        if self.is_stopping:
            return "stopping"
        return DRAINING if self.is_draining else READY

    @property
    def stopping(self) -> RetryLaterError | None:
        """Return why no turn is served any more, if that is so."""
        if not self.is_stopping:
            return None
        message = f"{self.name} is stopping"
        return RetryLaterError(message, code="stopping")

    def refuse_new(self) -> None:
        """Raise where this node takes no new agents."""
        if self.is_draining or self.is_stopping:
            message = f"this node is {self.state}"
            raise RetryElsewhereError(message, code="draining")

    def note_failed_round(self) -> None:
        """Count a round of background work that failed; its loop has told the log."""
        self.failed_rounds += 1
