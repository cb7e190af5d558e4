"""Faults of a simulated fabric, as the command line spells them.

lose:NODE@60+120     the node dies at 60 s and is back 120 s later; without +120, it stays away
drain:NODE@60+120    its agents are moved away from 60 s on; it takes new ones 120 s later
slow:NODE@60+120x3   all its computing takes three times as long
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Final

from fabric.errors import RejectedError
from fabric.ids import NodeName
from router.simulate.machine import Machine, Misjudged
from router.simulate.moves import SimulatedMoves
from router.simulate.router_side import RouterSide
from router.simulate.timeline import Action, Timeline

_NUMBER: Final = r"\d+(?:\.\d+)?"
_FAULT: Final = re.compile(
    rf"(lose|drain|slow):([a-z0-9-]+)@({_NUMBER})(?:\+({_NUMBER}))?(?:x({_NUMBER}))?", re.ASCII
)
_RANGE: Final = re.compile(rf"({_NUMBER})-({_NUMBER})", re.ASCII)


class FaultKind(StrEnum):
    """Kind of a fault of one node."""

    LOSE = "lose"
    DRAIN = "drain"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one node, with its time and its end."""

    kind: FaultKind
    node: NodeName
    at_s: float
    lasts_s: float | None = None  # None: until the end
    factor: float = 1.0


def parse_fault(text: str) -> Fault:
    """Read one fault; raise RejectedError with the forms that there are."""
    match = _FAULT.fullmatch(text.strip())
    is_slow = text.startswith("slow")
    if match is None or is_slow != (match[5] is not None) or (is_slow and float(match[5]) <= 0):
        message = (
            f"{text!r} is not a fault; write lose:NODE@SECONDS, drain:NODE@SECONDS or "
            "slow:NODE@SECONDSxFACTOR, with +SECONDS after the time if it ends"
        )
        raise RejectedError(message, code="invalid_fault")
    lasts_s = float(match[4]) if match[4] else None
    factor = float(match[5] or 1.0)
    return Fault(FaultKind(match[1]), NodeName(match[2]), float(match[3]), lasts_s, factor)


def parse_factors(text: str) -> tuple[float, float]:
    """Read a range of factors such as 0.6-1.6; raise RejectedError for anything else."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= float(match[2]):
        message = f"{text!r} is not a range of factors; write for example 0.6-1.6"
        raise RejectedError(message, code="invalid_factors")
    return float(match[1]), float(match[2])


def require_nodes(faults: Iterable[Fault], names: Iterable[str]) -> None:
    """Raise RejectedError if a fault names a node that the fleet does not have."""
    known = set(names)
    for fault in faults:
        if fault.node not in known:
            shown = ", ".join(sorted(known)[:8])
            message = f"the fleet has no node {fault.node!r}; name one of: {shown}"
            raise RejectedError(message, code="unknown_node")


def misjudge(machines: Iterable[Machine], factors: tuple[float, float], seed: int) -> None:
    """Let nodes report speeds that are wrong by factors in a range, each by its own."""
    for machine in machines:
        random = Random(f"speeds:{seed}:{machine.name}")
        machine.misjudged = Misjudged(random.uniform(*factors), random.uniform(*factors))


class FaultPlan:
    """Faults of one run, begun and ended at their times."""

    def __init__(
        self,
        timeline: Timeline,
        machines: Mapping[NodeName, Machine],
        router: RouterSide,
        moves: SimulatedMoves,
    ) -> None:
        self._timeline = timeline
        self._machines = machines
        self._router = router
        self._moves = moves

    def schedule(self, faults: Iterable[Fault]) -> None:
        """Plan faults; their nodes must exist."""
        for fault in faults:
            machine = self._machines[fault.node]
            begin, end = self._actions(fault, machine)
            self._timeline.at(fault.at_s, begin)
            if fault.lasts_s is not None:
                self._timeline.at(fault.at_s + fault.lasts_s, end)

    def _actions(self, fault: Fault, machine: Machine) -> tuple[Action, Action]:
        if fault.kind is FaultKind.LOSE:
            return machine.die, machine.restart
        if fault.kind is FaultKind.DRAIN:
            return partial(self._drain, machine), partial(self._undrain, machine)
        return partial(self._slow, machine, fault.factor), partial(self._slow, machine, 1.0)

    def _drain(self, machine: Machine) -> None:
        machine.is_draining = True
        if machine.is_up:
            self._router.refresh(machine.name)
        self._moves.drain(machine.name)

    def _undrain(self, machine: Machine) -> None:
        machine.is_draining = False

    def _slow(self, machine: Machine, factor: float) -> None:
        machine.engine.slowness = factor
