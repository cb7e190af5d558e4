"""Earlier answers of a conversation: restored in a prompt, matched after edits, remembered.

Most programs send an answer's text and calls back without its reasoning; some trim white space,
rewrite arguments or replace the ids of calls. The prompt then differs from what was computed, and
from what the model was trained on. So after each turn the agent's record remembers the parts that
clients drop or rewrite, and the next prompt gets them back.

An answer is known by its place: a hash of all messages up to it that ignores reasoning, white
space, ids and the spelling of arguments. An edit of something before an answer changes its place.
Then an agent's own answers are matched by signs: the answer itself, without its reasoning, and one
neighbour, which is the message or answer before it, or the answer after it. An answer that occurs
several times is the first, second or last of them while all of them are there; after that only its
calls' ids identify it. A sign that matches two answers matches neither.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest

from fabric.limits import ANSWERS_BYTES_MAX
from fabric.record.answers import Answers, CallWritten, OmittedParts
from fabric.settings import DATES_OPTION, RESTORE_OPTION
from fabric.turn.conversation_form import FormChain, form_chain
from fabric.turn.generation import GenerateRequest, IdentityKind, ToolCall
from fabric.turn.messages import Message, MessageRole, ToolUse, spelled_arguments
from node.dialect.answer_delta import AnswerDelta
from node.dialect.template_messages import WrittenArguments
from node.prompt.prompt_boundaries import move_date_lines

Signs = tuple[int, ...]  # hashes that each identify an answer
_AFTER_MESSAGE: Final = 1
_AFTER_ANSWER: Final = 2
_BEFORE_ANSWER: Final = 3
_BY_CALL_IDS: Final = 4


def answer_signs(messages: Sequence[Message], digests: Sequence[int]) -> list[Signs]:
    """Return the signs of each message that is an answer; `digests` are of all messages."""
    answers = [at for at, message in enumerate(messages) if message.role is MessageRole.ASSISTANT]
    counts, seen = Counter(digests[at] for at in answers), Counter[int]()
    signs: list[Signs] = [()] * len(messages)
    for number, at in enumerate(answers):
        digest = digests[at]
        identity = (digest, seen[digest], counts[digest])
        seen[digest] += 1
        message_signs = _call_id_signs(messages[at], digest)
        if at:
            message_signs.append(_sign(_AFTER_MESSAGE, *identity, digests[at - 1]))
        if number:
            message_signs.append(_sign(_AFTER_ANSWER, *identity, digests[answers[number - 1]]))
        if number + 1 < len(answers):
            message_signs.append(_sign(_BEFORE_ANSWER, *identity, digests[answers[number + 1]]))
        signs[at] = tuple(message_signs)
    uses = Counter(sign for message_signs in signs for sign in message_signs)
    return [tuple(sign for sign in message_signs if uses[sign] == 1) for message_signs in signs]


def _sign(kind: int, *parts: int) -> int:
    return xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in parts), seed=kind)


def _call_id_signs(answer: Message, digest: int) -> list[int]:
    """Return the sign of an answer by its calls' ids, if all calls have one."""
    ids = [use.id for use in answer.uses]
    if not ids or not all(ids):
        return []
    joined = "\0".join(map(str, ids)).encode("utf-8", "surrogatepass")
    return [_sign(_BY_CALL_IDS, digest, xxh3_64_intdigest(joined))]


def match_answers(signs_at: Mapping[int, Signs], answers: Answers) -> dict[int, OmittedParts]:
    """Return the `answers` that the signs identify without doubt, by the places of the signs."""
    index: dict[int, set[int]] = defaultdict(set)
    for old_place, answer in answers.items():
        for sign in answer.signs:
            index[sign].add(old_place)
    old_places = dict(_old_places(signs_at, index))
    uses = Counter(old_places.values())
    return {place: answers[old] for place, old in old_places.items() if uses[old] == 1}


def _old_places(
    signs_at: Mapping[int, Signs], index: Mapping[int, set[int]]
) -> Iterator[tuple[int, int]]:
    for place, signs in signs_at.items():
        candidates = {old for sign in signs for old in index.get(sign, ())}
        if len(candidates) == 1:
            yield place, candidates.pop()


_OWN_OPTIONS: Final = frozenset({RESTORE_OPTION, DATES_OPTION})
NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class MessagePlaces:
    """Places of a conversation's messages: the chained hash of all messages up to each one."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._chain = xxh3_64(seed=2)
        hashed = [_extend(self._chain, message) for message in messages]
        self.places = tuple(place for place, _ in hashed)
        self.digests = tuple(digest for _, digest in hashed)  # one digest per message

    def with_next(self, message: Message) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return all places and digests, followed by those of one more message."""
        place, digest = _extend(self._chain.copy(), message)
        return (*self.places, place), (*self.digests, digest)


def _extend(chain: xxh3_64, message: Message) -> tuple[int, int]:
    uses = [(use.name, spelled_arguments(use.arguments)) for use in message.uses]
    hashed = [message.role.value, "".join(message.texts).strip(), message.name, uses]
    spelled = json.dumps(hashed).encode() + b"\n"
    chain.update(spelled)
    return chain.intdigest(), xxh3_64_intdigest(spelled)


@dataclass(frozen=True, slots=True)
class LocatedRequest:
    """A request as its client sent it, with its dates moved, and the places of its messages."""

    request: GenerateRequest
    note: str
    places: MessagePlaces
    answer_places: tuple[int, ...]  # places of the answers that may be restored
    restores: bool = True  # what the client dropped from them
    forms: FormChain | None = None  # forms of a conversation that is found by its content


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """Earlier answers of a conversation, by their places."""

    at: Answers = field(default_factory=dict)  # answers at the request's places, by any agent
    own: Answers = field(default_factory=dict)  # all answers of the agent


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """A request whose earlier answers read as the model wrote them."""

    located: LocatedRequest
    request: GenerateRequest
    note: str  # text that is appended to a match's reason
    answers: Answers = field(default_factory=dict)  # those restored, of any agent


def locate_messages(
    request: GenerateRequest, default_options: Mapping[str, Any] = NO_OPTIONS
) -> LocatedRequest:
    """Hash a request's messages and move its dates; `default_options` are the operator's.

    Takes time by the byte; thread-safe.
    """
    forms = _forms(request)
    options = {**default_options, **request.template_options}
    others = {k: v for k, v in request.template_options.items() if k not in _OWN_OPTIONS}
    request, note = replace(request, template_options=others), ""
    if options.get(DATES_OPTION) is True and request.messages:
        moved = move_date_lines(request.messages)
        note = "; moved dates" if moved is not request.messages else ""
        request = replace(request, messages=tuple(moved))
    messages = request.messages or ()
    places = MessagePlaces(messages)
    if options.get(RESTORE_OPTION) is False:
        return LocatedRequest(request, note, places, (), restores=False, forms=forms)
    answers = (message.role is MessageRole.ASSISTANT for message in messages)
    found = tuple(compress(places.places, answers))
    return LocatedRequest(request, note, places, found, forms=forms)


def _forms(request: GenerateRequest) -> FormChain | None:
    """Return the forms of an unnamed conversation, or of a named one that moved within a turn."""
    is_named = request.identity.kind is IdentityKind.AGENT and request.resume is None
    if is_named or not request.messages or not request.is_kept:
        return None
    messages = request.messages[:-1] if request.continues else request.messages
    return form_chain(messages, request.tools)


def restore_answers(located: LocatedRequest, known: KnownAnswers) -> RestoredRequest:
    """Return the request for the template, with its earlier answers as in `known`."""
    request, note = located.request, located.note
    messages = request.messages or ()
    answers = {**known.at, **_match_after_edits(located, known)}
    if not answers:
        return RestoredRequest(located, request, note)
    restored = list(_with_answers(messages, located.places.places, answers))
    if request.continues:  # the answer continues at the client's very last character
        restored[-1] = replace(restored[-1], texts=messages[-1].texts)
    pairs = list(zip(messages, restored, strict=True))
    thoughts = sum(a.reasoning != b.reasoning for a, b in pairs)
    spellings = sum(_spelling(a) != _spelling(b) for a, b in pairs)
    note += f"; restored reasoning: {thoughts}" if thoughts else ""
    note += f"; restored spelling: {spellings}" if spellings else ""
    request = replace(request, messages=tuple(restored))
    return RestoredRequest(located, request, note, answers)


def _match_after_edits(located: LocatedRequest, known: KnownAnswers) -> dict[int, OmittedParts]:
    """Match the agent's own answers whose places an edit has changed."""
    places = located.places
    missing = {*located.answer_places} - known.at.keys()
    unplaced = {place: answer for place, answer in known.own.items() if place not in known.at}
    if not missing or not unplaced:
        return {}
    signs = answer_signs(located.request.messages or (), places.digests)
    by_place = zip(places.places, signs, strict=True)
    return match_answers({place: own for place, own in by_place if place in missing}, unplaced)


def _spelling(message: Message) -> Any:
    if message.role is not MessageRole.ASSISTANT:
        return None
    uses = [(use.id, json.dumps(use.arguments)) for use in message.uses]
    return "".join(message.texts), uses


def _with_answers(
    messages: Sequence[Message], places: Sequence[int], answers: Answers
) -> Iterator[Message]:
    renamed: dict[str | None, str] = {}
    for message, place in zip(messages, places, strict=True):
        answer = answers.get(place)
        if message.role is MessageRole.ASSISTANT:
            renamed = _renamed_ids(message, answer) if answer is not None else {}
            yield _restore_message(message, answer, renamed) if answer is not None else message
        elif message.result_of in renamed:
            yield replace(message, result_of=renamed[message.result_of])
        else:
            yield message


def _renamed_ids(message: Message, answer: OmittedParts) -> dict[str | None, str]:
    """Map the client's call ids to the model's; return {} if they are ambiguous."""
    ids = [use.id for use in message.uses]
    if len(ids) != len(answer.calls) or len({*ids}) < len(ids) or not all(ids):
        return {}
    return {sent_id: call.id for sent_id, call in zip(ids, answer.calls, strict=True)}


def _restore_message(
    message: Message, answer: OmittedParts, renamed: dict[str | None, str]
) -> Message:
    text = answer.space_before + "".join(message.texts).strip() + answer.space_after
    uses = message.uses
    if len(uses) == len(answer.calls):
        uses = tuple(
            replace(use, arguments=_arguments(use.arguments, call), id=renamed.get(use.id, use.id))
            for use, call in zip(uses, answer.calls, strict=True)
        )
    return replace(
        message,
        texts=message.texts if text == "".join(message.texts) else (text,),
        reasoning=None if message.is_stripped else message.reasoning or answer.reasoning or None,
        uses=uses,
    )


def _arguments(sent: Any, call: CallWritten) -> Any:
    """Return the arguments as the model wrote them, if they are an object."""
    try:
        parsed = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return sent
    return WrittenArguments(call.arguments, parsed) if isinstance(parsed, dict) else sent


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

    With restoring switched off, only the parts of earlier answers that the prompt had are kept.
    """
    answers = {**answers, **prompt.answers} if prompt.located.restores else {}
    messages = prompt.request.messages
    if not messages or (shown.is_plain and not answers):
        return answers
    answer = shown.message
    if not prompt.request.continues:
        places = prompt.located.places
        return conversation_answers(answers, messages, answer, places, redacted)
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
