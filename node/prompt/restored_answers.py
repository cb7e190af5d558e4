"""Put back what a client left out of an earlier answer, or spelled otherwise.

Most programs send an answer's text and calls, and drop its reasoning; some trim its white space,
write arguments anew or give calls ids of their own. The prompt then differs from what was computed,
and from what the model was trained on. An answer is known by its place: by all messages up to it,
reasoning, white space, ids and the spelling of arguments apart. Behind an edit the agent's own
answers are known by their neighbours.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest

from fabric.limits import ANSWERS_BYTES_MAX
from fabric.record.answers import Answered, Answers, CallWritten
from fabric.template_options import DATES_OPTION, RESTORE_OPTION
from fabric.turn.generation import GenerateRequest, ToolCall
from fabric.turn.messages import Message, MessageRole, ToolUse, spelled_arguments
from node.dialect.shown import Shown
from node.dialect.spelling import WrittenArguments
from node.prompt.answer_matching import known_again, signs
from node.prompt.date_lines import with_dates_moved

_OWN: Final = frozenset({RESTORE_OPTION, DATES_OPTION})
NOTHING_REDACTED: Final[Mapping[int, Message]] = MappingProxyType({})
NOTHING_TOLD: Final[Mapping[str, Any]] = MappingProxyType({})


class MessagePlaces:
    """Where each message of a conversation stands: the chained hash of all up to it."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._digest = xxh3_64(seed=2)
        hashed = [_add(self._digest, message) for message in messages]
        self.at = tuple(place for place, _ in hashed)
        self.said = tuple(own for _, own in hashed)  # digests of each message alone

    def with_next(self, message: Message) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return places and digests with those of one that is said next."""
        place, own = _add(self._digest.copy(), message)
        return (*self.at, place), (*self.said, own)


def _add(digest: xxh3_64, message: Message) -> tuple[int, int]:
    uses = [(use.name, spelled_arguments(use.arguments)) for use in message.uses]
    said = [message.role.value, "".join(message.texts).strip(), message.name, uses]
    spelled = json.dumps(said).encode() + b"\n"
    digest.update(spelled)
    return digest.intdigest(), xxh3_64_intdigest(spelled)


@dataclass(frozen=True, slots=True)
class LocatedRequest:
    """A request as the client means it, and where its messages stand; no answer is put back yet."""

    request: GenerateRequest
    note: str
    places: MessagePlaces
    wanted: tuple[int, ...]  # of the answers that may be put back
    restores: bool = True  # what the client left out of them


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """What is known of a conversation's answers."""

    at: Answers = field(default_factory=dict)  # by their places, whoever gave them
    own: Answers = field(default_factory=dict)  # all of the agent's own


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """A request with what was left out of it."""

    request: GenerateRequest
    note: str = ""  # in words that follow a match's reason
    answers: Answers = field(default_factory=dict)  # that were, whoever gave them


@dataclass(slots=True, eq=False)
class ShownAnswer:
    """What a client is shown of one answer."""

    _thoughts: list[str] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)
    places: MessagePlaces | None = None  # of the request's messages
    restores: bool = True  # what the client left out of earlier answers
    put_back: Answers = field(default_factory=dict)  # into these

    def add(self, shown: Shown) -> None:
        self._thoughts.append(shown.reasoning)
        self._texts.append(shown.text)
        self._calls += shown.calls

    @property
    def text(self) -> str:
        """All of its text, without thoughts and calls."""
        return "".join(self._texts)

    @property
    def message(self) -> Message:
        """The answer as a message."""
        uses = tuple(ToolUse(call.name, call.arguments, call.id) for call in self._calls)
        thought = "".join(self._thoughts) or None
        return Message(MessageRole.ASSISTANT, (self.text,), reasoning=thought, uses=uses)

    def remembered(
        self, request: GenerateRequest, answers: Answers, redacted: Mapping[int, Message]
    ) -> Answers:
        """Return the agent's answers with this one; of those in `redacted` what is left.

        Where nothing is restored, nothing of the earlier ones is kept that the prompt did not have.
        """
        answers = {**answers, **self.put_back} if self.restores else {}
        is_plain = not (self._calls or any(self._thoughts)) and _is_trimmed(self.text)
        if not request.messages or (is_plain and not answers):
            return answers
        answer = self.message
        if request.continues:
            *before, begun = request.messages
            thought = (begun.reasoning or "") + (answer.reasoning or "")
            answer = replace(answer, texts=begun.texts + answer.texts, reasoning=thought or None)
            return remember(answers, before, answer, redacted=redacted)
        return remember(answers, request.messages, answer, self.places, redacted)


def located(request: GenerateRequest, told: Mapping[str, Any] = NOTHING_TOLD) -> LocatedRequest:
    """Find where a request's messages stand, with what the operator `told` of options.

    Its dates move where that is asked. It takes time by the byte: any thread may.
    """
    options = {**told, **request.template_options}
    left = {name: each for name, each in request.template_options.items() if name not in _OWN}
    request, note = replace(request, template_options=left), ""
    if options.get(DATES_OPTION) is True and request.messages:
        moved = with_dates_moved(request.messages)
        note = "; moved dates" if moved is not request.messages else ""
        request = replace(request, messages=tuple(moved))
    messages = request.messages or ()
    places = MessagePlaces(messages)
    if options.get(RESTORE_OPTION) is False:
        return LocatedRequest(request, note, places, (), restores=False)
    answers = (each.role is MessageRole.ASSISTANT for each in messages)
    return LocatedRequest(request, note, places, tuple(compress(places.at, answers)))


def put_back(found: LocatedRequest, said: KnownAnswers) -> RestoredRequest:
    """Return the request as the template is to have it: with its answers as they were `said`."""
    request, note = found.request, found.note
    messages = request.messages or ()
    known = {**said.at, **_behind_edits(found, said)}
    if not known:
        return RestoredRequest(request, note)
    whole = list(_with_answers(messages, found.places.at, known))
    if request.continues:  # from the very character that the client gave
        whole[-1] = replace(whole[-1], texts=messages[-1].texts)
    thoughts = sum(a.reasoning != b.reasoning for a, b in zip(messages, whole, strict=True))
    spellings = sum(_spelling(a) != _spelling(b) for a, b in zip(messages, whole, strict=True))
    note += f"; restored reasoning: {thoughts}" if thoughts else ""
    note += f"; restored spelling: {spellings}" if spellings else ""
    return RestoredRequest(replace(request, messages=tuple(whole)), note, known)


def _behind_edits(found: LocatedRequest, said: KnownAnswers) -> dict[int, Answered]:
    """Find the agent's own answers whose places an edit has changed."""
    places = found.places
    lacking = {*found.wanted} - said.at.keys()
    left = {place: each for place, each in said.own.items() if place not in said.at}
    if not lacking or not left:
        return {}
    by_place = zip(places.at, signs(found.request.messages or (), places.said), strict=True)
    return known_again({at: each for at, each in by_place if at in lacking}, left)


def _spelling(message: Message) -> Any:
    if message.role is not MessageRole.ASSISTANT:
        return None
    uses = [(use.id, json.dumps(use.arguments)) for use in message.uses]
    return "".join(message.texts), uses


def _with_answers(
    messages: Sequence[Message], at: Sequence[int], answers: Answers
) -> Iterator[Message]:
    renamed: dict[str | None, str] = {}
    for message, place in zip(messages, at, strict=True):
        said = answers.get(place)
        if message.role is MessageRole.ASSISTANT:
            renamed = _renamed(message, said) if said is not None else {}
            yield _as_said(message, said, renamed) if said is not None else message
        elif message.result_of in renamed:
            yield replace(message, result_of=renamed[message.result_of])
        else:
            yield message


def _renamed(message: Message, said: Answered) -> dict[str | None, str]:
    """Say which id of the client's is which of the model's; nothing where that is not clear."""
    ids = [use.id for use in message.uses]
    if len(ids) != len(said.calls) or len({*ids}) < len(ids) or not all(ids):
        return {}
    return {own: call.id for own, call in zip(ids, said.calls, strict=True)}


def _as_said(message: Message, said: Answered, renamed: dict[str | None, str]) -> Message:
    text = said.before + "".join(message.texts).strip() + said.behind
    uses = message.uses
    if len(uses) == len(said.calls):
        uses = tuple(
            replace(use, arguments=_arguments(use, call), id=renamed.get(use.id, use.id))
            for use, call in zip(uses, said.calls, strict=True)
        )
    return replace(
        message,
        texts=message.texts if text == "".join(message.texts) else (text,),
        reasoning=None if message.is_stripped else message.reasoning or said.reasoning or None,
        uses=uses,
    )


def _arguments(use: ToolUse, call: CallWritten) -> dict[str, Any] | str:
    parsed = _parsed(call.arguments)
    return WrittenArguments(call.arguments, parsed) if isinstance(parsed, dict) else use.arguments


def remember(
    answers: Answers,
    messages: Sequence[Message],
    answer: Message,
    places: MessagePlaces | None = None,
    redacted: Mapping[int, Message] = NOTHING_REDACTED,
) -> Answers:
    """Return the answers of this conversation and its new one; the oldest go first.

    Of messages that directives changed, which are in `redacted`, only white space is kept.
    """
    known: dict[int, Answered] = {}
    left_bytes = ANSWERS_BYTES_MAX
    places = places or MessagePlaces(messages)
    at, own = places.with_next(answer)
    everything = [*messages, answer]
    rows = [*enumerate(zip(at, everything, signs(everything, own), strict=True))]
    for number, (place, message, told) in reversed(rows):
        if message.role is not MessageRole.ASSISTANT:
            continue
        said = _said(message) if message is answer else answers.get(place, Answered())
        said = replace(said, reasoning=message.reasoning or said.reasoning, signs=told)
        if number in redacted:
            said = _redacted(said, redacted[number])
        if said.is_empty:
            continue
        try:
            left_bytes -= said.size_bytes
        except UnicodeEncodeError:
            continue
        if left_bytes < 0:
            break
        known[place] = said
    return dict(reversed(known.items()))


def _redacted(said: Answered, left: Message) -> Answered:
    """Return an answer without what was taken out of it; ids stay where its calls do."""
    calls = tuple(CallWritten("", use.id or "") for use in left.uses)
    return replace(said, reasoning=left.reasoning or "", calls=calls)


def _is_trimmed(text: str) -> bool:
    return text == text.strip()


def _said(answer: Message) -> Answered:
    text = "".join(answer.texts)
    before = text[: len(text) - len(text.lstrip())]
    behind = text[len(text.rstrip()) :] if before != text else ""
    calls = [CallWritten(str(use.arguments), use.id or "") for use in answer.uses]
    return Answered(answer.reasoning or "", before, behind, tuple(calls))


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
