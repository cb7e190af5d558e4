"""Memory edits of a run: apply a phase's directives in the fabric, and restore them if lost.

A node that dies takes the directives of its agents with it unless another node has their records.
The agent's next answer then comes from unedited memory, so edits are checked after each answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from fabric.ids import AgentId, OperationId
from fabric.turn.messages import MessageRole
from router.scenario.conversation import history_before
from router.scenario.fabric_client import (
    RETRY_WAIT_S,
    RUN_OPERATION_PREFIX,
    AskAgainError,
    FabricClient,
)
from router.scenario.journal import run_in_thread
from router.scenario.run_state import RunState
from router.scenario.scenario import MemoryEdit, Phase, Scenario
from router.scenario.transcript import RunTranscript

CLEARED: Final = "[cleared]"
_OPERATION_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class RunEdits:
    """Edits of a run's phases: adds them to agents, and restores those that were lost."""

    run: str  # part of the operations' ids
    state: RunState
    client: FabricClient
    id_of: Callable[[str], AgentId]
    stale: set[str] = field(default_factory=set)  # agents that may hold earlier runs' edits

    async def add(self, agent: str, phase: Phase, number: int) -> None:
        """Add one edit of a phase to an agent's memory; raise FabricError."""
        items = await run_in_thread(partial(self._items, phase, number))
        if items:
            op = self._operation(phase, number)
            await self.client.direct(self.id_of(agent), items, op)

    async def restore(self, agent: str) -> str:
        """Make an agent hold exactly this run's edits; return why its answer is invalid, or "".

        Raises AskAgainError where no node has the agent.
        """
        if agent in self.stale:
            had_edits = await self.client.undo_edits(self.id_of(agent))
            self.stale.discard(agent)
            if had_edits:
                return "it held edits of an earlier run: they were undone, its answer was dropped"
        wanted_edits = list(self._wanted_edits(agent))
        if not wanted_edits:
            return ""
        present = await self.client.run_edits(self.id_of(agent))
        if present is None:
            message = f"no node has {agent}"
            raise AskAgainError(message, RETRY_WAIT_S)
        is_restored = False
        missing = [edit for edit in wanted_edits if self._operation(*edit) not in present]
        for phase, number in missing:
            if await run_in_thread(partial(self._items, phase, number)):
                await self.add(agent, phase, number)
                is_restored = True
        lost = "its edits were lost with its node: they were added again, its answer was dropped"
        return lost if is_restored else ""

    def _wanted_edits(self, agent: str) -> Iterator[tuple[Phase, int]]:
        """Yield the edits that an agent must hold, including those inherited by a fork."""
        editable = agent
        for phase in reversed(self.state.scenario.phases):
            for number, edit in enumerate(phase.directives):
                if edit.agent == editable and (phase.id, number) in self.state.edits:
                    yield phase, number
            if phase.fork is not None and editable in phase.fork.copies:
                editable = phase.fork.source

    def _items(self, phase: Phase, number: int) -> list[dict[str, Any]]:
        edit = phase.directives[number]
        return directive_items(self.state.scenario, self.state.transcript, phase, edit)

    def _operation(self, phase: Phase, number: int) -> OperationId:
        return operation_id(self.run, "direct", phase.id, str(number))


def operation_id(run: str, *place: str) -> OperationId:
    """Return an operation's id: unique to the run, and the same when the run is resumed."""
    return OperationId(f"{RUN_OPERATION_PREFIX}{digest(_OPERATION_BYTES, run, *place)}")


def digest(size_bytes: int, *parts: str) -> str:
    """Return a digest of texts as hexadecimal digits."""
    return blake2b("\0".join(parts).encode(), digest_size=size_bytes).hexdigest()


def directive_items(
    scenario: Scenario, transcript: RunTranscript, phase: Phase, edit: MemoryEdit
) -> list[dict[str, Any]]:
    """Return an edit as items of POST /v1/agents/ID/directives; empty if nothing matches."""
    history = history_before(scenario, transcript, edit.agent, phase.id)
    if edit.clear_results_of is not None:
        return [
            {"tool_call_id": message.result_of, "replacement": CLEARED, "mode": edit.mode.value}
            for message in history.messages
            if message.result_of is not None and message.name == edit.clear_results_of
        ]
    # A directive applies to all messages with its text, so a text that other phases also contain
    # is kept.
    inside = {edit.forget}
    elsewhere = {
        (item.message.role, item.message.texts[0])
        for item in history.items
        if item.phases != inside
    }
    return [
        {
            "message": {"role": role.value, "content": text},
            "replacement": None,
            "mode": edit.mode.value,
        }
        for role, text in dict.fromkeys(
            (item.message.role, item.message.texts[0])
            for item in history.items
            if item.phases == inside
        )
        if (role, text) not in elsewhere and role is not MessageRole.SYSTEM
    ]
