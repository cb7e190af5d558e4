"""What a run has done: made of the events that last, also those of an earlier process."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.scenario.expectations import PromptFigures
from router.scenario.run_events import AgentCopied, AgentSpoke, Lasting, MemoryEdited, StepTaken
from router.scenario.scenario import Scenario
from router.scenario.speaker import TurnFigures
from router.scenario.turn_order import TurnTable
from router.scenario.utterance import Said, ToolStep, TurnKey, by_turn


@dataclass(slots=True)
class RunState:
    """Grows with each lasting event, and with nothing else."""

    scenario: Scenario
    said: Said = field(default_factory=dict)
    steps: dict[TurnKey, list[ToolStep]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[TurnKey, list[TurnFigures]] = field(default_factory=lambda: defaultdict(list))
    copies: list[AgentCopied] = field(default_factory=list)
    edits: set[tuple[str, int]] = field(default_factory=set)  # a phase, and its directive's number
    turns: TurnTable = field(init=False)
    _nodes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = TurnTable(self.scenario)

    @classmethod
    def of(cls, scenario: Scenario, events: Iterable[Lasting]) -> "RunState":
        """Return the state behind these events; raise RejectedError where they do not fit."""
        state = cls(scenario)
        for event in events:
            state.note(event)
        return state

    def note(self, event: Lasting) -> None:
        """Take in what has happened."""
        if isinstance(event, StepTaken):
            if event.number == len(self.steps[event.turn]):  # else it was noted before
                self.steps[event.turn].append(event.step)
                self.figures[event.turn].append(event.figures)
                self._nodes[event.turn.speaker] = event.figures.node
        elif isinstance(event, AgentSpoke):
            utterance = event.utterance
            if utterance.turn in self.said or utterance.turn not in self.turns:
                by_turn(self.scenario, [*self.said.values(), utterance])  # raises, and says why
            self.said = {**self.said, utterance.turn: utterance}  # others read what was before
            self.figures[utterance.turn].append(event.figures)
            self._nodes[utterance.speaker] = event.figures.node
        elif isinstance(event, AgentCopied):
            self.copies.append(event)
            self._nodes[event.agent] = event.copied.node
        elif isinstance(event, MemoryEdited):
            self.edits.add((event.phase, event.number))

    def was_forked(self, phase: str, agent: str) -> bool:
        """Say whether a phase's fork has made an agent already."""
        return any((c.phase, c.agent) == (phase, agent) and c.source for c in self.copies)

    def prompt_figures(self) -> dict[TurnKey, PromptFigures]:
        """Sum up each turn's prompts."""
        return {
            turn: PromptFigures(
                sum(each.prompt_tokens for each in several),
                sum(each.cached_tokens for each in several),
            )
            for turn, several in self.figures.items()
            if turn in self.said
        }

    def node_of(self, agent: str) -> str | None:
        """Name the node where an agent was last."""
        return self._nodes.get(agent)
