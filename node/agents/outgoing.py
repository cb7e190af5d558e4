"""Outgoing move of an agent: one object with a state, from the request to the new owner.

    here ──▶ asked ──▶ sealing ──▶ sealed ──▶ left
      ◀────────┴──────────┴───────────┘            aborted

A running turn is asked to stop, and publishes the last record of the move; an idle agent is sealed
at once. The seal is also in the record, so it survives a restart. A new owner takes effect as soon
as it is reported to this node; the record follows when the disk accepts it.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from fabric.control.node_calls import SealAgent
from fabric.ids import MigrationId, NodeName
from node.runtime.one_loop import of_one_loop


class OutgoingState(Enum):
    """State of an agent's outgoing move."""

    HERE = "here"  # no move in progress
    ASKED = "asked"  # the running turn stops at the next token
    SEALING = "sealing"  # the turn publishes the last record of the move
    SEALED = "sealed"  # turns wait until the move is committed or aborted
    LEFT = "left"  # another node owns it


@dataclass(frozen=True, slots=True)
class Successor:
    """New owner of an agent; the node itself if the owner is unknown."""

    node: NodeName
    epoch: int


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class OutgoingMove:
    """Outgoing move of one agent; used on the node's event loop only."""

    state: OutgoingState = OutgoingState.HERE
    seal: SealAgent | None = None  # the call that asked the running turn to stop
    fence: int = 0  # another owner's epoch; turns at lower epochs are not acknowledged
    successor: Successor | None = None  # last reported owner
    _decided: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Let turns wait only if the agent is sealed already."""
        if self.state is not OutgoingState.SEALED:
            self._decided.set()

    async def wait_until_decided(self) -> None:
        """Wait until the move is committed or aborted, if the agent is sealed."""
        await self._decided.wait()

    # --- the running turn --------------------------------------------------------------------

    def ask(self, seal: SealAgent) -> None:
        """Request the running turn to stop for this move."""
        self.seal = seal
        if self.state is OutgoingState.HERE:
            self.state = OutgoingState.ASKED

    def is_asked(self, migration: MigrationId) -> bool:
        """Return whether this move has requested the turn to stop."""
        return self.seal is not None and self.seal.migration == migration

    def begin_sealing(self) -> SealAgent | None:
        """Note that the turn is being saved; return the seal to save it with, if any."""
        if self.state is OutgoingState.ASKED:
            self.state = OutgoingState.SEALING
        return self.seal

    def stop_asking(self) -> MigrationId | None:
        """Note that the turn has ended or continues; return the move that requested its stop."""
        seal, self.seal = self.seal, None
        if self.state in {OutgoingState.ASKED, OutgoingState.SEALING}:
            self.state = OutgoingState.HERE
        return seal.migration if seal is not None else None

    # --- the agent ---------------------------------------------------------------------------

    def note_sealed(self) -> None:
        """Note that the record is sealed; turns wait from now on."""
        self.state = OutgoingState.SEALED
        self._decided.clear()

    def note_owned_here(self) -> None:
        """Note that this node owns the agent: the move was aborted, or the agent moved back."""
        self.state = OutgoingState.HERE
        self._decided.set()

    def note_successor(self, to: Successor) -> None:
        """Note the agent's new owner before its record names it."""
        if self.successor is None or self.successor.epoch <= to.epoch:
            self.successor = to
        self.note_owned_elsewhere(to.epoch)

    def note_erased(self, epoch: int) -> None:
        """Note that the agent is erased up to `epoch`: it has no successor."""
        self.successor = None
        self.raise_fence(epoch + 1)

    def note_owned_elsewhere(self, epoch: int) -> None:
        """Note that another node owns the agent at `epoch`, or that it was erased below `epoch`."""
        self.raise_fence(epoch)
        self.state = OutgoingState.LEFT
        self._decided.set()

    def raise_fence(self, epoch: int) -> None:
        """Reject acknowledgements of turns below `epoch`."""
        self.fence = max(self.fence, epoch)
