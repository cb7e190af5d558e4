"""Conversations of agents: the exact messages of a prompt, from the scenario and the transcript.

Every agent has one conversation through all phases. It only grows, so each prompt begins with the
text that the agent's cache holds from the turn before. It never contains what others said in a
phase that the agent does not hear.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fabric.errors import RejectedError
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.scenario.scenario import Phase, Scenario, TurnOrder
from router.scenario.template import MessagesPlace, TextTemplate, VariablePlace, render
from router.scenario.transcript import RunTranscript, ToolStep, TurnKey, Utterance

_CONTINUE = "Go on."  # between two answers of an agent that heard nothing new
_YOU = "You"
_SILENCE = "(says nothing)"


class MissingUtteranceError(RejectedError):
    """A prompt needs an utterance that is not in the transcript yet."""

    code = "wrong_transcript"


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """A message with the phases that its words come from; none for the system prompt."""

    message: Message
    phases: frozenset[str] = frozenset()


@dataclass(slots=True)
class AgentHistory:
    """Messages of one agent, which only grow at their end, and texts for its next message."""

    items: list[HistoryMessage] = field(default_factory=list)
    _pending: list[str] = field(default_factory=list)
    _pending_phases: set[str] = field(default_factory=set)

    def add_system(self, system: str) -> None:
        """Add the system prompt, if there is one."""
        if system:
            self.items.append(HistoryMessage(Message(MessageRole.SYSTEM, (system,))))

    def add_text(self, phase: str, text: str) -> None:
        """Add a text to the agent's next user message."""
        if text:
            self._pending.append(text)
            self._pending_phases.add(phase)

    def begin_turn(self, phase: str) -> None:
        """Turn all pending texts into one user message."""
        text = "\n\n".join(self._pending or (_CONTINUE,))
        self._add(Message(MessageRole.USER, (text,)), self._pending_phases | {phase})
        self._pending, self._pending_phases = [], set()

    def add_answer(self, utterance: Utterance) -> None:
        """Add a turn's tool calls and its answer."""
        self.add_steps(utterance.phase, utterance.steps)
        self._add(Message(MessageRole.ASSISTANT, (utterance.text,)), {utterance.phase})

    def add_steps(self, phase: str, steps: Iterable[ToolStep]) -> None:
        """Add a turn's tool calls with their results."""
        for step in steps:
            uses = tuple(
                ToolUse(call.name, _arguments(call.arguments), call.id) for call in step.calls
            )
            self._add(Message(MessageRole.ASSISTANT, (step.text,), uses=uses), {phase})
            for call in step.calls:
                result = Message(MessageRole.TOOL, (call.result,), call.name, result_of=call.id)
                self._add(result, {phase})

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(item.message for item in self.items)

    @property
    def heard(self) -> str:
        """All text that the agent has heard, answered or not, without its own words."""
        heard = [m.texts[0] for m in self.messages if m.role is not MessageRole.ASSISTANT]
        return "\n\n".join(heard + self._pending)

    def _add(self, message: Message, phases: Iterable[str]) -> None:
        self.items.append(HistoryMessage(message, frozenset(phases)))


def _arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any] | str:
    """Return a call's arguments as templates get them; blank text means no arguments."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else {}
    return dict(arguments)


def prompt(
    scenario: Scenario, transcript: RunTranscript, turn: TurnKey, steps: tuple[ToolStep, ...] = ()
) -> tuple[Message, ...]:
    """Return the messages of a turn's prompt.

    Args:
        scenario: with the run's variables.
        transcript: at least what the agent heard before; later turns change nothing.
        turn: the turn that the prompt is for.
        steps: tool calls of the same turn, with their results so far.
    """
    history = HistoryReplay(scenario, transcript).until(turn)
    history.add_steps(turn.phase, steps)
    return history.messages


def history_before(
    scenario: Scenario, transcript: RunTranscript, agent: str, phase: str
) -> AgentHistory:
    """Return an agent's history at the start of a phase."""
    return HistoryReplay(scenario, transcript).before(agent, phase)


def history_after(
    scenario: Scenario, transcript: RunTranscript, agent: str, phase: str
) -> AgentHistory:
    """Return an agent's history at the end of a phase."""
    return HistoryReplay(scenario, transcript).after(agent, phase)


class HistoryReplay:
    """Replay of a transcript that builds the history of one agent at a time."""

    def __init__(self, scenario: Scenario, transcript: RunTranscript) -> None:
        self._scenario = scenario
        self._transcript = transcript

    def until(self, turn: TurnKey) -> AgentHistory:
        history = self.before(turn.speaker, turn.phase)
        self._replay(history, turn.speaker, self._scenario.phase(turn.phase), turn)
        return history

    def after(self, agent: str, phase_id: str) -> AgentHistory:
        """Return the history after a phase; a phase of its own may still be running."""
        history, first = self._start(agent, phase_id)
        with suppress(MissingUtteranceError):
            for phase in self._scenario.phases[first:]:
                self._replay(history, agent, phase, None)
                if phase.id == phase_id:
                    break
        return history

    def before(self, agent: str, phase_id: str) -> AgentHistory:
        history, first = self._start(agent, phase_id)
        for phase in self._scenario.phases[first:]:
            if phase.id == phase_id:
                return history
            self._replay(history, agent, phase, None)
        message = f"'{agent}' has no history yet in '{phase_id}'"
        raise MissingUtteranceError(message)

    def _start(self, agent: str, phase_id: str) -> tuple[AgentHistory, int]:
        """Return the history that an agent begins with, and the first phase to replay."""
        for number, phase in enumerate(self._scenario.phases):
            if phase.fork and agent in phase.fork.copies:
                return self.before(phase.fork.source, phase.id), number
            if phase.id == phase_id:
                break
        history = AgentHistory()
        system = self._scenario.agents[agent].system
        history.add_system(self._text(system) if system else "")
        return history, 0

    def _replay(
        self, history: AgentHistory, agent: str, phase: Phase, until: TurnKey | None
    ) -> None:
        """Add the utterances that an agent hears in a phase, up to its answer in turn `until`."""
        if agent not in phase.hearers:
            return
        history.add_text(phase.id, f"[{phase.title or phase.id}]")
        for text in (phase.opening, phase.prompts.get(agent)):
            if text is not None:
                history.add_text(phase.id, self._text(text))
        for number in range(1, phase.rounds + 1):
            for speaker in _in_hearing_order(phase, number, agent):
                turn = TurnKey(phase.id, number, speaker)
                if speaker != agent:
                    if phase.hears(agent, speaker):
                        history.add_text(phase.id, self._line(turn))
                    continue
                question = phase.ask_text(agent, number)
                history.add_text(phase.id, self._text(question) if question else "")
                history.begin_turn(phase.id)
                if turn == until:
                    return
                history.add_answer(self._utterance(turn))

    def _line(self, turn: TurnKey, perspective: str = "") -> str:
        """Return an utterance as others hear it; no line of it can pass for another speaker's."""
        name = _YOU if turn.speaker == perspective else self._scenario.shown_name(turn.speaker)
        lines = self._utterance(turn).text.strip().splitlines() or [_SILENCE]
        return f"{name}: " + "\n  ".join(lines)

    def _utterance(self, turn: TurnKey) -> Utterance:
        utterance = self._transcript.get(turn)
        if utterance is None:
            place = f"{turn.speaker} in round {turn.round} of {turn.phase}"
            message = f"the transcript has no utterance of {place}"
            raise MissingUtteranceError(message)
        return utterance

    def _text(self, template: TextTemplate) -> str:
        return render(template, self._fill)

    def _fill(self, place: VariablePlace | MessagesPlace) -> Iterator[str]:
        if isinstance(place, VariablePlace):
            yield self._scenario.variables[place.name]
            return
        phase = self._scenario.phase(place.phase)
        separator = ""
        for number, speaker in phase.turns:
            if phase.hears(place.agent, speaker):
                yield separator + self._line(TurnKey(phase.id, number, speaker), place.agent)
                separator = "\n"


def _in_hearing_order(phase: Phase, number: int, agent: str) -> list[str]:
    """Return a round's speakers as an agent hears them; in parallel, itself first."""
    speakers = list(phase.speakers(number))
    if phase.order is TurnOrder.PARALLEL and agent in speakers:
        speakers.remove(agent)
        speakers.insert(0, agent)
    return speakers
