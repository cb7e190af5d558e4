"""One agent's conversation as it grows: what it is told becomes messages when it answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fabric.turn.messages import Message, MessageRole, ToolUse
from router.scenario.utterance import ToolStep, Utterance

_GO_ON = "Go on."  # between two answers of an agent that was told nothing else


@dataclass(frozen=True, slots=True)
class Remembered:
    """A message, and the phases whose words it holds; none for the system prompt."""

    message: Message
    phases: frozenset[str] = frozenset()


@dataclass(slots=True)
class Memory:
    """Messages that only ever grow at their end, and what was told since the last answer."""

    remembered: list[Remembered] = field(default_factory=list)
    _told: list[str] = field(default_factory=list)
    _told_in: set[str] = field(default_factory=set)

    def begin(self, system: str) -> None:
        """Put the system prompt first."""
        if system:
            message = Message(MessageRole.SYSTEM, (system,))
            self.remembered.append(Remembered(message))

    def tell(self, phase: str, text: str) -> None:
        """Tell the agent something; consecutive things become one message."""
        if text:
            self._told.append(text)
            self._told_in.add(phase)

    def listen(self, phase: str) -> None:
        """Make one message of all that was told since the last answer: the agent's turn begins."""
        text = "\n\n".join(self._told or (_GO_ON,))
        self._add(Message(MessageRole.USER, (text,)), self._told_in | {phase})
        self._told, self._told_in = [], set()

    def answer(self, utterance: Utterance) -> None:
        """Put a turn's answer behind what it answers."""
        self.work(utterance.phase, utterance.steps)
        self._add(Message(MessageRole.ASSISTANT, (utterance.text,)), {utterance.phase})

    def work(self, phase: str, steps: Iterable[ToolStep]) -> None:
        """Put a turn's tool calls there, with their results."""
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
        return tuple(item.message for item in self.remembered)

    @property
    def told(self) -> str:
        """All that the agent was told so far, answered or not, without its own words."""
        own = MessageRole.ASSISTANT
        heard = [m.texts[0] for m in self.messages if m.role is not own]
        return "\n\n".join(heard + self._told)

    def _add(self, message: Message, phases: Iterable[str]) -> None:
        self.remembered.append(Remembered(message, frozenset(phases)))


def _arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any] | str:
    """Return a call's arguments as templates get them; blank text is a call without any."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else {}
    return dict(arguments)
