"""Remember an agent's answers, so that later prompts can restore what their client dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.limits import ANSWERS_BYTES_MAX
from fabric.record.answers import Answers, CallWritten, OmittedParts
from fabric.turn.generation import ToolCall
from fabric.turn.messages import Message, MessageRole, ToolUse
from node.dialect.answer_delta import AnswerDelta
from node.prompt.answer_matching import answer_signs
from node.prompt.restored_answers import MessagePlaces, RestoredRequest


@dataclass(slots=True, eq=False)
class ShownAnswer:
    """The part of an answer that its client is shown: reasoning, text and calls."""

    _thoughts: list[str] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)

    def add(self, shown: AnswerDelta) -> None:
        self._thoughts.append(shown.reasoning)
        self._texts.append(shown.text)
        self._calls += shown.calls

    @property
    def text(self) -> str:
        """All of its text, without thoughts and calls."""
        return "".join(self._texts)

    @property
    def is_plain(self) -> bool:
        """Whether clients send it back as it is: no thoughts or calls, no white space to trim."""
        is_trimmed = self.text == self.text.strip()
        return is_trimmed and not self._calls and not any(self._thoughts)

    @property
    def message(self) -> Message:
        """The answer as a message."""
        uses = tuple(ToolUse(call.name, call.arguments, call.id) for call in self._calls)
        reasoning = "".join(self._thoughts) or None
        return Message(MessageRole.ASSISTANT, (self.text,), reasoning=reasoning, uses=uses)


def remember_answer(
    prompt: RestoredRequest,
    shown: ShownAnswer,
    answers: Answers,
    redacted: Mapping[int, Message],
) -> Answers:
    """Return the agent's `answers` with the new one; redact the `redacted` ones.

    With restoring switched off, only those parts of earlier answers are kept that the prompt had.
    """
    answers = {**answers, **prompt.answers} if prompt.restores else {}
    messages = prompt.request.messages
    if not messages or (shown.is_plain and not answers):
        return answers
    answer = shown.message
    if not prompt.request.continues:
        return conversation_answers(answers, messages, answer, prompt.places, redacted)
    *before, begun = messages
    reasoning = (begun.reasoning or "") + (answer.reasoning or "")
    answer = replace(answer, texts=begun.texts + answer.texts, reasoning=reasoning or None)
    return conversation_answers(answers, before, answer, MessagePlaces(before), redacted)


def conversation_answers(
    answers: Answers,
    messages: Sequence[Message],
    last: Message,
    places: MessagePlaces,
    redacted: Mapping[int, Message],
) -> Answers:
    """Return the answers to remember of a conversation that ends with answer `last`.

    The oldest answers are dropped first. Of `redacted` messages only white space is kept.
    """
    remembered: dict[int, OmittedParts] = {}
    left_bytes = ANSWERS_BYTES_MAX
    all_places, digests = places.with_next(last)
    conversation = [*messages, last]
    rows = zip(all_places, conversation, answer_signs(conversation, digests), strict=True)
    for number, (place, message, signs) in reversed([*enumerate(rows)]):
        if message.role is not MessageRole.ASSISTANT:
            continue
        answer = _parts_of(message) if message is last else answers.get(place, OmittedParts())
        answer = replace(answer, reasoning=message.reasoning or answer.reasoning, signs=signs)
        if number in redacted:
            answer = _redact_answer(answer, redacted[number])
        if answer.is_empty:
            continue
        try:
            left_bytes -= answer.size_bytes
        except UnicodeEncodeError:
            continue
        if left_bytes < 0:
            break
        remembered[place] = answer
    return dict(reversed(remembered.items()))


def _redact_answer(answer: OmittedParts, redacted: Message) -> OmittedParts:
    """Drop the parts of an answer that directives dropped; ids of kept calls stay."""
    calls = tuple(CallWritten("", use.id or "") for use in redacted.uses)
    return replace(answer, reasoning=redacted.reasoning or "", calls=calls)


def _parts_of(message: Message) -> OmittedParts:
    text = "".join(message.texts)
    before = text[: len(text) - len(text.lstrip())]
    after = text[len(text.rstrip()) :] if before != text else ""
    calls = [CallWritten(str(use.arguments), use.id or "") for use in message.uses]
    return OmittedParts(message.reasoning or "", before, after, tuple(calls))
