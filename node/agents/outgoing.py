"""An agent's way out of its node: one object for what a move asks of it, and how far that is.

    here ──▶ asked ──▶ sealing ──▶ sealed ──▶ left
      ◀────────┴──────────┴───────────┘            taken back

A turn that runs is asked to stop, and publishes its record as the move's last one; an idle agent
is sealed at once. The seal is in the record, too, and survives a restart. Who was given the agent
instead counts from the moment that the node is told; the record follows as soon as the disk takes
it.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from fabric.control.node_calls import SealAgent
from fabric.ids import MigrationId, NodeName
from node.runtime.one_loop import of_one_loop


class OutgoingState(Enum):
    """How far an agent is on its way out."""

    HERE = "here"  # no move takes it
    ASKED = "asked"  # its turn stops at the next token
    SEALING = "sealing"  # its turn's record is being published as the move's last one
    SEALED = "sealed"  # turns wait until the move is decided
    LEFT = "left"  # another node owns it


@dataclass(frozen=True, slots=True)
class Successor:
    """Who owns the agent instead; the node itself where nobody could say who."""

    node: NodeName
    epoch: int


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class OutgoingMove:
    """Outgoing move of one agent; used on the node's event loop only."""

    state: OutgoingState = OutgoingState.HERE
    seal: SealAgent | None = None  # what the turn that runs is asked to end with
    fence: int = 0  # another node owns this epoch: no turn of a lower one is acknowledged
    successor: Successor | None = None  # the last that it was told of
    _decided: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Let turns wait only where the agent is sealed already."""
        if self.state is not OutgoingState.SEALED:
            self._decided.set()

    async def decided(self) -> None:
        """Wait until no move has the agent sealed."""
        await self._decided.wait()

    # --- the turn that runs ------------------------------------------------------------------

    def ask(self, seal: SealAgent) -> None:
        """Note that the turn is to stop for this move."""
        self.seal = seal
        if self.state is OutgoingState.HERE:
            self.state = OutgoingState.ASKED

    def is_asked(self, migration: MigrationId) -> bool:
        """Say whether it is to stop for this very move."""
        return self.seal is not None and self.seal.migration == migration

    def begin_sealing(self) -> SealAgent | None:
        """Note that the turn is being saved; return the move that this ends it for, if any."""
        if self.state is OutgoingState.ASKED:
            self.state = OutgoingState.SEALING
        return self.seal

    def stop_asking(self) -> MigrationId | None:
        """Note that its turn has ended, or goes on here after all; return the move that asked."""
        seal, self.seal = self.seal, None
        if self.state in {OutgoingState.ASKED, OutgoingState.SEALING}:
            self.state = OutgoingState.HERE
        return seal.migration if seal is not None else None

    # --- the agent ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Note that its record is sealed: turns wait from now on."""
        self.state = OutgoingState.SEALED
        self._decided.clear()

    def settle(self) -> None:
        """Note that the agent is this node's: it was taken back, or has come again."""
        self.state = OutgoingState.HERE
        self._decided.set()

    def give_way(self, to: Successor) -> None:
        """Note who owns the agent from now on, whatever its record says."""
        if self.successor is None or self.successor.epoch <= to.epoch:
            self.successor = to
        self.leave(to.epoch)

    def end(self, epoch: int) -> None:
        """Note that the agent is erased up to `epoch`: what is left of it follows nobody."""
        self.successor = None
        self.raise_fence(epoch + 1)

    def leave(self, epoch: int) -> None:
        """Note that another node owns the agent at `epoch`, or that it was erased below."""
        self.raise_fence(epoch)
        self.state = OutgoingState.LEFT
        self._decided.set()

    def raise_fence(self, epoch: int) -> None:
        """Let no turn below `epoch` be acknowledged any more."""
        self.fence = max(self.fence, epoch)
