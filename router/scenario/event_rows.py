"""Events of runs as JSON rows, written by the router and read by its clients.

Rows contain what agents said, as transcripts do, and never their prompts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fabric.codec import from_plain, to_plain
from fabric.errors import RejectedError
from router.scenario.expectations import Verdict
from router.scenario.run_events import (
    AgentAsked,
    AgentCopied,
    AgentSpoke,
    MemoryEdited,
    PhaseBegan,
    PhaseEnded,
    RunEvent,
    StepTaken,
    Waited,
)
from router.scenario.scenario import Expectation

_KINDS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        "phase.began": PhaseBegan,
        "turn.began": AgentAsked,
        "turn.step": StepTaken,
        "turn.ended": AgentSpoke,
        "agent.copied": AgentCopied,
        "memory.edited": MemoryEdited,
        "waited": Waited,
        "phase.ended": PhaseEnded,
    }
)
_NAMES: Final = MappingProxyType({kind: name for name, kind in _KINDS.items()})


def event_name(event: RunEvent) -> str:
    """Return an event's name."""
    return _NAMES[type(event)]


def event_row(event: RunEvent) -> dict[str, Any]:
    """Return an event as JSON."""
    if isinstance(event, PhaseEnded):
        verdicts = [{"holds": v.holds, "found": v.found} for v in event.verdicts]
        return {"phase": event.phase, "verdicts": verdicts}
    row: dict[str, Any] = to_plain(event)
    return row


def read_event(name: str, row: Mapping[str, Any]) -> RunEvent | None:
    """Return a row's event; None for an unknown name or form."""
    kind = _KINDS.get(name)
    if kind is None:
        return None
    try:
        if kind is PhaseEnded:
            verdicts = tuple(
                Verdict(Expectation(), bool(v["holds"]), str(v["found"])) for v in row["verdicts"]
            )
            return PhaseEnded(str(row["phase"]), verdicts)
        event: RunEvent = from_plain(kind, dict(row), name)
    except (RejectedError, KeyError, TypeError):
        return None
    return event
