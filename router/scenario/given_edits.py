"""The memory edits that a run has given its agents, and whether the fabric still holds them.

A node that dies takes the directives of its agents with it unless another node has their records.
The agent's next answer then comes from unedited memory, so it is checked after each answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from fabric.ids import AgentId, OperationId
from router.scenario.memory_edits import directive_items
from router.scenario.run_state import RunState
from router.scenario.scenario import Phase
from router.scenario.speaker import RUN_EDITS, WAIT_S, AskAgainError, ScenarioSpeaker
from router.scenario.work import beside

_OPERATION_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class GivenEdits:
    """Gives agents the edits of their phases, and gives them again where they were lost."""

    run: str  # operations are named after it
    state: RunState
    speaker: ScenarioSpeaker
    id_of: Callable[[str], AgentId]
    uncleared: set[str] = field(default_factory=set)  # agents that may hold earlier runs' edits

    async def give(self, agent: str, phase: Phase, number: int) -> None:
        """Give an agent one edit of a phase; raise FabricError."""
        items = await beside(partial(self._items, phase, number))
        if items:
            op = self._operation(phase, number)
            await self.speaker.direct(self.id_of(agent), items, op)

    async def restore(self, agent: str) -> str:
        """Leave an agent with this run's edits alone; say what was wrong, or nothing.

        Raises AskAgainError where no node has the agent.
        """
        if agent in self.uncleared:
            had_any = await self.speaker.take_back(self.id_of(agent))
            self.uncleared.discard(agent)
            if had_any:
                return "it held the edits of an earlier run: undone, and its answer dropped"
        wanted = list(self._wanted(agent))
        if not wanted:
            return ""
        held = await self.speaker.edits(self.id_of(agent))
        if held is None:
            message = f"no node has the memory of {agent} any more"
            raise AskAgainError(message, WAIT_S)
        is_restored = False
        missing = [each for each in wanted if self._operation(*each) not in held]
        for phase, number in missing:
            if await beside(partial(self._items, phase, number)):
                await self.give(agent, phase, number)
                is_restored = True
        lost = "its edits were lost with its node: given again, and its answer dropped"
        return lost if is_restored else ""

    def _wanted(self, agent: str) -> Iterator[tuple[Phase, int]]:
        """Yield the edits of an agent, those included that a fork inherits."""
        editable = agent
        for phase in reversed(self.state.scenario.phases):
            for number, edit in enumerate(phase.directives):
                if edit.agent == editable and (phase.id, number) in self.state.edits:
                    yield phase, number
            if phase.fork is not None and editable in phase.fork.copies:
                editable = phase.fork.source

    def _items(self, phase: Phase, number: int) -> list[dict[str, Any]]:
        edit = phase.directives[number]
        return directive_items(self.state.scenario, self.state.said, phase, edit)

    def _operation(self, phase: Phase, number: int) -> OperationId:
        return operation_id(self.run, "direct", phase.id, str(number))


def operation_id(run: str, *place: str) -> OperationId:
    """Name an operation of a run: the same one whenever the run goes on, and no other run's."""
    return OperationId(f"{RUN_EDITS}{digest(_OPERATION_BYTES, run, *place)}")


def digest(size_bytes: int, *parts: str) -> str:
    """Return a digest of texts in hexadecimal digits."""
    return blake2b("\0".join(parts).encode(), digest_size=size_bytes).hexdigest()
