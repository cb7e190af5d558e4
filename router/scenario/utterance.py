"""What was said in a run so far: all that a run's state is, and all that a resumed one needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.errors import RejectedError
from router.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Which turn: one agent's in one round of one phase; rounds count from 1."""

    phase: str
    round: int
    speaker: str


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A tool call of a turn, and what the tool answered."""

    id: str  # the same in every prompt: directives name results by it
    name: str
    arguments: dict[str, Any] | str  # text where the model wrote no object
    result: str


@dataclass(frozen=True, slots=True)
class ToolStep:
    """An answer within a turn that calls tools, with their results."""

    calls: tuple[AnsweredCall, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A turn that has ended; `text` is the whole answer as it was generated."""

    phase: str
    round: int
    speaker: str
    text: str
    steps: tuple[ToolStep, ...] = ()

    @property
    def turn(self) -> TurnKey:
        return TurnKey(self.phase, self.round, self.speaker)


Said = Mapping[TurnKey, Utterance]


def by_turn(scenario: Scenario, transcript: Iterable[Utterance]) -> Said:
    """Order what was said by turn; raise RejectedError for what this scenario has no turn for."""
    turns = {TurnKey(p.id, n, s): None for p in scenario.phases for n, s in p.turns}
    said: dict[TurnKey, Utterance] = {}
    for utterance in transcript:
        turn = utterance.turn
        if turn not in turns or turn in said:
            why = "twice" if turn in said else "by nobody who has a turn there"
            what = f"{turn.speaker} in round {turn.round} of {turn.phase}"
            message = f"the transcript does not fit the scenario: {what} is said {why}"
            raise RejectedError(message, code="wrong_transcript")
        said[turn] = utterance
    return {turn: said[turn] for turn in turns if turn in said}
