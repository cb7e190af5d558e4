"""Directives: their application to a conversation and an agent's text, and those still pending."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeAlias

from fabric.limits import CALL_IDS_KNOWN_MAX
from fabric.record.directive import Directive, dropped_text, live_directives, text_digest
from fabric.record.manifest import Manifest
from fabric.record.message_parts import (
    OtherParts,
    all_words,
    has_words,
    other_parts,
    text_only_digest,
    with_arguments,
    without_arguments,
    without_words,
)
from fabric.record.message_positions import SentMessage, message_digest
from fabric.turn.messages import Message, MessageRole, spelled_arguments

_Numbered: TypeAlias = tuple[int, Directive]  # in the order in which they were made


@dataclass(frozen=True, slots=True)
class DirectedMessages:
    """Conversation after its directives, and the directives that matched messages of it."""

    messages: tuple[Message, ...]
    matched: tuple[Directive, ...]
    sent: tuple[SentMessage, ...]  # one for each message of the client
    parts: tuple[OtherParts, ...] | None  # None: too many to know
    redacted: Mapping[int, Message]  # by the numbers of messages whose calls or thoughts changed


def edit_messages(
    messages: Sequence[Message],
    directives: Sequence[Directive],
    salt: bytes = b"",
    sent: Sequence[Message] | None = None,
) -> DirectedMessages:
    """Apply directives to messages; of two for a whole message, the newer one wins.

    `sent` are the messages as their client spells them, with its own ids of calls.
    """
    sent = messages if sent is None else sent
    digests = [message_digest(message) for message in messages]
    by_number = _MessageIndex(messages, sent, digests, live_directives(directives)).by_message()
    edited: list[Message] = []
    positions: list[SentMessage] = []
    matched: dict[int, Directive] = {}
    redacted: dict[int, Message] = {}
    renamed: dict[str, tuple[str, str]] = {}  # ids of calls: their new ids and names
    for number, message in enumerate(messages):
        matching = _directives_for(message, by_number.get(number, ()))
        replacements = _edit_message(message, sent[number], matching)
        matched |= {
            id(directive): _note_digest(directive, message, sent[number], salt)
            for directive in matching
        }
        if message.role is MessageRole.ASSISTANT:
            renamed = _renamed_calls(message, replacements)
        replacements = tuple(_answering(answer, message, renamed) for answer in replacements)
        edited += replacements
        if _has_lost_parts(message, replacements, matching):
            redacted[number] = replacements[0] if replacements else Message(message.role, ())
        text = "".join(replacements[0].texts) if replacements else None
        is_edited = any(directive.is_whole or directive.span is not None for directive in matching)
        chars = sum(map(len, message.texts))
        positions.append(SentMessage(message.role, digests[number], chars, text, is_edited))
    parts = _parts_of(messages, sent)
    return DirectedMessages(
        tuple(edited), tuple(matched.values()), tuple(positions), parts, redacted
    )


@dataclass(frozen=True, slots=True)
class _MessageIndex:
    """Index of the messages that directives name."""

    messages: Sequence[Message]
    sent: Sequence[Message]
    digests: Sequence[bytes]
    directives: Sequence[Directive]

    def by_message(self) -> dict[int, list[_Numbered]]:
        by_digest = {
            directive.message_digest
            for directive in self.directives
            if directive.message_digest is not None
        }
        whole, text_only = self._index_digests(by_digest) if by_digest else ({}, {})
        by_call = (
            self._by_call() if any(directive.result_of for directive in self.directives) else {}
        )
        by_number: dict[int, list[_Numbered]] = defaultdict(list)
        for order, directive in enumerate(self.directives):
            numbers: Sequence[int]
            if directive.result_of is not None:
                numbers = by_call.get((directive.result_of, directive.part is None), ())
            elif directive.message_digest is not None:
                numbers = _message_numbers(directive, whole, text_only)
            else:
                continue
            for number in dict.fromkeys(numbers):
                by_number[number].append((order, directive))
        return by_number

    def _by_call(self) -> dict[tuple[str, bool], list[int]]:
        """Index messages by the ids of calls that they make or answer, of client and model."""
        numbers: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for number, both in enumerate(zip(self.messages, self.sent, strict=True)):
            for message in both:
                if message.result_of is not None:
                    numbers[message.result_of, True].append(number)
                for use in message.uses:
                    if use.id is not None:
                        numbers[use.id, False].append(number)
        return numbers

    def _index_digests(
        self, wanted: set[bytes]
    ) -> tuple[dict[bytes, list[int]], dict[bytes, list[int]]]:
        """Index messages by digest, with their calls and without."""
        whole: dict[bytes, list[int]] = defaultdict(list)
        text_only: dict[bytes, list[int]] = defaultdict(list)
        for number, (message, sent) in enumerate(zip(self.messages, self.sent, strict=True)):
            whole[self.digests[number]].append(number)
            for digest in {text_only_digest(message), text_only_digest(sent)} & wanted:
                text_only[digest].append(number)
        return whole, text_only


def _message_numbers(
    directive: Directive,
    whole: Mapping[bytes, Sequence[int]],
    text_only: Mapping[bytes, Sequence[int]],
) -> Sequence[int]:
    """List the messages of a digest; a client that gave no calls computed it without them."""
    digest = directive.message_digest or b""
    if directive.nth is None:
        return [*whole.get(digest, ()), *text_only.get(digest, ())]
    same = whole.get(digest) or text_only.get(digest) or ()
    return same[directive.nth : directive.nth + 1]


def _directives_for(message: Message, numbered: Iterable[_Numbered]) -> list[Directive]:
    """List the directives for a message: one that replaces all of it, or those of its parts."""
    if message.role is MessageRole.SYSTEM:  # system messages are never edited
        return []
    concerned = [directive for _, directive in sorted(numbered, key=itemgetter(0))]
    whole = [directive for directive in concerned if directive.is_whole]
    if whole:
        return whole[-1:]
    return [
        directive
        for directive in concerned
        if directive.besides_text is None or has_words(message, directive.besides_text)
    ]


def _note_digest(directive: Directive, message: Message, sent: Message, salt: bytes) -> Directive:
    """Return a directive with a digest of the text that it removes."""
    if directive.dropped is not None or directive.besides_text is not None:
        return directive
    if directive.part is not None:
        uses = (message.uses[at] for at in _uses_of(directive, message, sent))
        text = "".join(spelled_arguments(use.arguments) for use in uses if use.arguments)
    else:
        text = all_words(message) if directive.is_whole else "".join(message.texts)
    return replace(directive, dropped=dropped_text(salt, text))


def _edit_message(
    message: Message, sent: Message, directives: Sequence[Directive]
) -> tuple[Message, ...]:
    if not directives:
        return (message,)
    if directives[0].is_whole:
        return _replace_message(message, directives[0].replacement)
    text = "".join(message.texts)
    spans = [directive for directive in directives if directive.span is not None]
    for directive in sorted(spans, key=lambda directive: directive.span or (0, 0), reverse=True):
        start, end = directive.span or (0, 0)
        text = text[:start] + (directive.replacement or "") + text[end:]
    if spans:
        message = replace(message, texts=(text,))
    for directive in directives:
        for use_at in _uses_of(directive, message, sent) if directive.part is not None else ():
            message = with_arguments(message, use_at, directive.replacement)
    for directive in directives:
        # Ids may be replaced too, so this comes last: calls are found by their ids.
        if directive.besides_text is not None:
            message = without_words(message, directive.besides_text, directive.replacement or "")
    return (message,)


def _uses_of(directive: Directive, message: Message, sent: Message) -> Iterator[int]:
    for at, use in enumerate(message.uses):
        sent_id = sent.uses[at].id if len(sent.uses) == len(message.uses) else None
        if directive.result_of in {use.id, sent_id}:
            yield at


def _replace_message(message: Message, text: str | None) -> tuple[Message, ...]:
    # Calls and their results stay together: neither can be left out alone.
    if text is None and not message.uses and message.result_of is None:
        return ()
    emptied = without_arguments(message)
    return (replace(emptied, texts=(text or "",), reasoning=None),)


def _renamed_calls(message: Message, replacements: Sequence[Message]) -> dict[str, tuple[str, str]]:
    """Return the changed ids and names of calls, since their results name them too."""
    if not replacements or len(replacements[0].uses) != len(message.uses):
        return {}
    pairs = zip(message.uses, replacements[0].uses, strict=True)
    return {
        old.id: (new.id or "", new.name)
        for old, new in pairs
        if old.id is not None and (old.id, old.name) != (new.id, new.name)
    }


def _answering(
    answer: Message, message: Message, renamed: Mapping[str, tuple[str, str]]
) -> Message:
    if message.result_of is None or message.result_of not in renamed:
        return answer
    new_id, name = renamed[message.result_of]
    return replace(answer, result_of=new_id, name=None if answer.name is None else name)


def _has_lost_parts(
    message: Message, replacements: Sequence[Message], matching: Sequence[Directive]
) -> bool:
    """Return whether thoughts or calls of an answer were changed.

    Those of a replaced answer are gone, although its client may not have sent them.
    """
    if message.role is not MessageRole.ASSISTANT:
        return False
    if any(directive.is_whole for directive in matching):
        return True
    return not replacements or (replacements[0].reasoning, replacements[0].uses) != (
        message.reasoning,
        message.uses,
    )


def _parts_of(
    messages: Sequence[Message], sent: Sequence[Message]
) -> tuple[OtherParts, ...] | None:
    described = map(other_parts, range(len(messages)), messages, sent)
    known = tuple(parts for parts in described if parts is not None)
    return known if sum(len(parts.ids) for parts in known) <= CALL_IDS_KNOWN_MAX else None


def pending_directives(record: Manifest) -> tuple[Directive, ...]:
    """Return the directives still to be applied to a record's own text, in order."""
    unapplied = [
        d for d in live_directives(record.directives) if d.at is not None and not d.is_applied
    ]
    if not unapplied:
        return ()
    text, done, pending = record.text.encode("utf-8", "surrogatepass"), 0, []
    for directive in sorted(unapplied, key=lambda directive: directive.at or (0, 0)):
        start, end = directive.at or (0, 0)
        if start >= done and text_digest(text[start:end]) == directive.was:
            pending.append(directive)
            done = end
    return tuple(pending)


def edits_of(directives: Sequence[Directive]) -> list[tuple[int, int, int]]:
    """Return start, end and new size in bytes of what directives replace in a record's text."""
    return [
        (*directive.at, len((directive.replacement or "").encode("utf-8", "replace")))
        for directive in directives
        if directive.at is not None
    ]


def rewrite_text(record: Manifest) -> bytes:
    """Return an agent's text with its pending directives applied."""
    text = record.text.encode("utf-8", "surrogatepass")
    for directive in reversed(pending_directives(record)):
        start, end = directive.at or (0, 0)
        spelled = (directive.replacement or "").encode("utf-8", "replace")
        text = text[:start] + spelled + text[end:]
    return text
