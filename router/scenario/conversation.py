"""The exact messages of an agent's next prompt, from the scenario and what was said so far.

Every agent has one conversation through all phases. It only grows, so each prompt begins with the
text that the agent's memory holds since the turn before. Nothing that others said without it being
there is ever a part of it.
"""

from collections.abc import Iterator
from contextlib import suppress

from fabric.errors import RejectedError
from fabric.turn.messages import Message
from router.scenario.memory import Memory
from router.scenario.scenario import Phase, Scenario, TurnOrder
from router.scenario.template import MessagesPlace, TextTemplate, VariablePlace, render
from router.scenario.utterance import Said, ToolStep, TurnKey, Utterance

_YOU = "You"
_SILENCE = "(says nothing)"


class MissingUtteranceError(RejectedError):
    """A prompt was asked for before all was said that it holds."""

    code = "wrong_transcript"


def prompt(
    scenario: Scenario, said: Said, turn: TurnKey, steps: tuple[ToolStep, ...] = ()
) -> tuple[Message, ...]:
    """Return the messages that a turn's answer is asked with.

    Args:
        scenario: with the run's variables.
        said: at least what the agent heard before; later turns change nothing.
        turn: whose prompt.
        steps: tool calls of this very turn, with their results so far.
    """
    memory = Recollection(scenario, said).until(turn)
    memory.work(turn.phase, steps)
    return memory.messages


def memory_before(scenario: Scenario, said: Said, agent: str, phase: str) -> Memory:
    """Return an agent's memory as a phase begins."""
    return Recollection(scenario, said).before(agent, phase)


def memory_behind(scenario: Scenario, said: Said, agent: str, phase: str) -> Memory:
    """Return an agent's memory as a phase has ended."""
    return Recollection(scenario, said).behind(agent, phase)


class Recollection:
    """Relives a run for one agent at a time."""

    def __init__(self, scenario: Scenario, said: Said) -> None:
        self._scenario = scenario
        self._said = said

    def until(self, turn: TurnKey) -> Memory:
        memory = self.before(turn.speaker, turn.phase)
        self._relive(memory, turn.speaker, self._scenario.phase(turn.phase), turn)
        return memory

    def behind(self, agent: str, phase_id: str) -> Memory:
        """Return what an agent remembers by then, though its own phase may not have ended yet."""
        memory, begins = self._born(agent, phase_id)
        with suppress(MissingUtteranceError):
            for phase in self._scenario.phases[begins:]:
                self._relive(memory, agent, phase, None)
                if phase.id == phase_id:
                    break
        return memory

    def before(self, agent: str, phase_id: str) -> Memory:
        memory, begins = self._born(agent, phase_id)
        for phase in self._scenario.phases[begins:]:
            if phase.id == phase_id:
                return memory
            self._relive(memory, agent, phase, None)
        message = f"'{agent}' has no memory yet in '{phase_id}'"
        raise MissingUtteranceError(message)

    def _born(self, agent: str, phase_id: str) -> tuple[Memory, int]:
        """Begin a memory: with a system prompt, or as a fork with another agent's."""
        for number, phase in enumerate(self._scenario.phases):
            if phase.fork and agent in phase.fork.copies:
                return self.before(phase.fork.source, phase.id), number
            if phase.id == phase_id:
                break
        memory = Memory()
        system = self._scenario.agents[agent].system
        memory.begin(self._text(system) if system else "")
        return memory, 0

    def _relive(self, memory: Memory, agent: str, phase: Phase, until: TurnKey | None) -> None:
        """Tell an agent of a phase, up to the moment when it answers in the turn `until`."""
        if agent not in phase.hearers:
            return
        memory.tell(phase.id, f"[{phase.title or phase.id}]")
        for text in (phase.opening, phase.prompts.get(agent)):
            if text is not None:
                memory.tell(phase.id, self._text(text))
        for number in range(1, phase.rounds + 1):
            for speaker in _in_hearing_order(phase, number, agent):
                turn = TurnKey(phase.id, number, speaker)
                if speaker != agent:
                    if phase.hears(agent, speaker):
                        memory.tell(phase.id, self._line(turn))
                    continue
                asked = phase.asked(agent, number)
                memory.tell(phase.id, self._text(asked) if asked else "")
                memory.listen(phase.id)
                if turn == until:
                    return
                memory.answer(self._utterance(turn))

    def _line(self, turn: TurnKey, perspective: str = "") -> str:
        """Spell what was said so that no line of it can pass for somebody else's."""
        name = _YOU if turn.speaker == perspective else self._scenario.shown_name(turn.speaker)
        lines = self._utterance(turn).text.strip().splitlines() or [_SILENCE]
        return f"{name}: " + "\n  ".join(lines)

    def _utterance(self, turn: TurnKey) -> Utterance:
        found = self._said.get(turn)
        if found is None:
            what = f"{turn.speaker} in round {turn.round} of {turn.phase}"
            message = f"the transcript lacks what was said by {what}"
            raise MissingUtteranceError(message)
        return found

    def _text(self, template: TextTemplate) -> str:
        return render(template, self._fill)

    def _fill(self, place: VariablePlace | MessagesPlace) -> Iterator[str]:
        if isinstance(place, VariablePlace):
            yield self._scenario.variables[place.name]
            return
        phase = self._scenario.phase(place.phase)
        between = ""
        for number, speaker in phase.turns:
            if phase.hears(place.agent, speaker):
                yield between + self._line(TurnKey(phase.id, number, speaker), place.agent)
                between = "\n"


def _in_hearing_order(phase: Phase, number: int, agent: str) -> list[str]:
    """Name a round's speakers as an agent hears them: in parallel, itself first."""
    speakers = list(phase.speakers(number))
    if phase.order is TurnOrder.PARALLEL and agent in speakers:
        speakers.remove(agent)
        speakers.insert(0, agent)
    return speakers
