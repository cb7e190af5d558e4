"""Transcript of a run: the utterances of its turns with their tool calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.errors import RejectedError
from router.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Identity of a turn: an agent in a round of a phase; rounds count from 1."""

    phase: str
    round: int
    speaker: str


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A tool call of a turn with its result."""

    id: str  # the same in every prompt: directives name results by it
    name: str
    arguments: dict[str, Any] | str  # text where the model wrote no JSON object
    result: str


@dataclass(frozen=True, slots=True)
class ToolStep:
    """An answer within a turn that calls tools, with the calls' results."""

    calls: tuple[AnsweredCall, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A finished turn; `text` is the whole answer as it was generated."""

    phase: str
    round: int
    speaker: str
    text: str
    steps: tuple[ToolStep, ...] = ()

    @property
    def turn(self) -> TurnKey:
        return TurnKey(self.phase, self.round, self.speaker)


RunTranscript = Mapping[TurnKey, Utterance]


def ordered_transcript(scenario: Scenario, utterances: Iterable[Utterance]) -> RunTranscript:
    """Return utterances in the order of turns; raise RejectedError for one without a turn."""
    turns = {TurnKey(p.id, n, s): None for p in scenario.phases for n, s in p.turns}
    by_turn: dict[TurnKey, Utterance] = {}
    for utterance in utterances:
        turn = utterance.turn
        if turn not in turns or turn in by_turn:
            problem = "occurs twice" if turn in by_turn else "is not a turn of it"
            place = f"{turn.speaker} in round {turn.round} of {turn.phase}"
            message = f"the transcript does not fit the scenario: {place} {problem}"
            raise RejectedError(message, code="wrong_transcript")
        by_turn[turn] = utterance
    return {turn: by_turn[turn] for turn in turns if turn in by_turn}
