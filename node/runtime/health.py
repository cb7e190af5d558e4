"""Health of a node: whether it accepts agents and keeps caches, and its present problems."""

from dataclasses import dataclass, field

from fabric.control.node_calls import ASLEEP, DRAINING, READY
from fabric.errors import RetryElsewhereError, RetryLaterError
from fabric.ids import NodeName
from node.runtime.one_loop import of_one_loop

NOT_ERASED = "an erasure is not complete on the disk"


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class Health:
    """Health of a node; used on its event loop."""

    name: NodeName
    problem: str | None = None  # why caches are not kept: every prompt is prefilled in full
    is_draining: bool = False  # no new agents, by an operator's command
    is_stopping: bool = False
    is_asleep: bool = False  # the machine has announced its sleep
    owes_erasure: bool = False  # the disk has refused a part of one
    troubles: dict[str, str] = field(default_factory=dict)  # present problems by cause
    failed_rounds: int = 0  # failed rounds of background work

    @property
    def reuses(self) -> bool:
        """Return whether caches are kept and reused."""
        return self.problem is None

    @property
    def degraded(self) -> str | None:
        """Present problems in words, or None."""
        unerased = [NOT_ERASED] if self.owes_erasure else []
        return "; ".join([*self.troubles.values(), *unerased]) or None

    @property
    def state(self) -> str:
        """State of the node in one word."""
        if self.is_stopping:
            return "stopping"
        if self.is_asleep:
            return ASLEEP
        return DRAINING if self.is_draining else READY

    @property
    def stopping(self) -> RetryLaterError | None:
        """Error for turns while the node stops or is about to sleep, or None."""
        if not self.is_stopping and not self.is_asleep:
            return None
        message = f"{self.name} is {self.state}"
        return RetryLaterError(message, code="stopping")

    def refuse_new(self) -> None:
        """Raise if this node accepts no new agents."""
        if self.state != READY:
            message = f"this node is {self.state}"
            raise RetryElsewhereError(message, code="draining")

    def note_failed_round(self) -> None:
        """Count a failed round of background work, which its loop has logged."""
        self.failed_rounds += 1
