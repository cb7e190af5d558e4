"""Restore what a client dropped from earlier answers, or spelled differently.

Most programs send an answer's text and calls back without its reasoning; some trim white space,
rewrite arguments or replace the ids of calls. The prompt then differs from what was computed, and
from what the model was trained on. An answer is known by its place: a hash of all messages up to
it that ignores reasoning, white space, ids and the spelling of arguments. After an edit, an agent's
own answers are matched by their neighbours (`answer_matching.py`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest

from fabric.record.answers import Answers, CallWritten, OmittedParts
from fabric.settings import DATES_OPTION, RESTORE_OPTION
from fabric.turn.conversation_form import FormChain, form_chain
from fabric.turn.generation import GenerateRequest, IdentityKind
from fabric.turn.messages import Message, MessageRole, spelled_arguments
from node.dialect.template_messages import WrittenArguments
from node.prompt.answer_matching import answer_signs, match_answers
from node.prompt.prompt_boundaries import move_date_lines

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

    request: GenerateRequest
    places: MessagePlaces
    note: str = ""  # text that is appended to a match's reason
    answers: Answers = field(default_factory=dict)  # those restored, of any agent
    restores: bool = True
    forms: FormChain | None = None


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
    request, note, places = located.request, located.note, located.places
    messages = request.messages or ()
    answers = {**known.at, **_match_after_edits(located, known)}
    if not answers:
        return RestoredRequest(
            request, places, note, restores=located.restores, forms=located.forms
        )
    restored = list(_with_answers(messages, places.places, answers))
    if request.continues:  # the answer continues at the client's very last character
        restored[-1] = replace(restored[-1], texts=messages[-1].texts)
    pairs = list(zip(messages, restored, strict=True))
    thoughts = sum(a.reasoning != b.reasoning for a, b in pairs)
    spellings = sum(_spelling(a) != _spelling(b) for a, b in pairs)
    note += f"; restored reasoning: {thoughts}" if thoughts else ""
    note += f"; restored spelling: {spellings}" if spellings else ""
    request = replace(request, messages=tuple(restored))
    return RestoredRequest(request, places, note, answers, located.restores, located.forms)


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
