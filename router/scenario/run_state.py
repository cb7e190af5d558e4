"""State of a run, folded from its durable events, also those of an earlier process."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.scenario.expectations import PromptFigures
from router.scenario.fabric_client import TurnFigures
from router.scenario.run_events import (
    AgentCopied,
    AgentSpoke,
    DurableEvent,
    MemoryEdited,
    StepTaken,
)
from router.scenario.scenario import Scenario
from router.scenario.transcript import RunTranscript, ToolStep, TurnKey, ordered_transcript
from router.scenario.turn_order import TurnTable


@dataclass(slots=True)
class RunState:
    """State of a run: transcript, figures, copies and edits; only durable events change it."""

    scenario: Scenario
    transcript: RunTranscript = field(default_factory=dict)
    steps: dict[TurnKey, list[ToolStep]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[TurnKey, list[TurnFigures]] = field(default_factory=lambda: defaultdict(list))
    copies: list[AgentCopied] = field(default_factory=list)
    edits: set[tuple[str, int]] = field(default_factory=set)  # phase and index of its directive
    turns: TurnTable = field(init=False)
    _nodes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = TurnTable(self.scenario)

    @classmethod
    def of(cls, scenario: Scenario, events: Iterable[DurableEvent]) -> "RunState":
        """Return the state after these events; raise RejectedError for events out of order."""
        state = cls(scenario)
        for event in events:
            state.apply(event)
        return state

    def apply(self, event: DurableEvent) -> None:
        """Update the state by an event; repeated steps are ignored."""
        if isinstance(event, StepTaken):
            if event.number == len(self.steps[event.turn]):  # else the event is a repetition
                self.steps[event.turn].append(event.step)
                self.figures[event.turn].append(event.figures)
                self._nodes[event.turn.speaker] = event.figures.node
        elif isinstance(event, AgentSpoke):
            utterance = event.utterance
            if utterance.turn in self.transcript or utterance.turn not in self.turns:
                # Raises an error that names the turn.
                ordered_transcript(self.scenario, [*self.transcript.values(), utterance])
            # Replaced, not changed, so that readers keep a consistent version.
            self.transcript = {**self.transcript, utterance.turn: utterance}
            self.figures[utterance.turn].append(event.figures)
            self._nodes[utterance.speaker] = event.figures.node
        elif isinstance(event, AgentCopied):
            self.copies.append(event)
            self._nodes[event.agent] = event.copied.node
        elif isinstance(event, MemoryEdited):
            self.edits.add((event.phase, event.number))

    def was_forked(self, phase: str, agent: str) -> bool:
        """Return whether a phase's fork has created an agent already."""
        return any((c.phase, c.agent) == (phase, agent) and c.source for c in self.copies)

    def prompt_figures(self) -> dict[TurnKey, PromptFigures]:
        """Return the total prompt tokens of each finished turn."""
        return {
            turn: PromptFigures(
                sum(answer.prompt_tokens for answer in answers),
                sum(answer.cached_tokens for answer in answers),
            )
            for turn, answers in self.figures.items()
            if turn in self.transcript
        }

    def node_of(self, agent: str) -> str | None:
        """Return the node that last had an agent; None before its first answer or copy."""
        return self._nodes.get(agent)
