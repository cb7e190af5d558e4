"""Positions of messages in a record's text, and the spans that directives may name."""

import re
from dataclasses import replace

import pytest

from fabric.edit_mode import EditMode
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import OperationId
from fabric.record.directed_messages import edits_of, pending_directives, rewrite_text
from fabric.record.directive import mark_applied
from fabric.record.manifest import AgentSettings, decode_manifest, encode_manifest
from fabric.record.message_positions import (
    MessagePositions,
    SentMessage,
    find_positions,
    message_digest,
)
from fabric.record.spans import Spans, WantedSpan
from fabric.turn.messages import Message, MessageRole
from tests.support.blocks import make_manifest

MARK = 9_000
MESSAGES = (
    (MessageRole.SYSTEM, "Be kind."),
    (MessageRole.USER, " user größe "),  # trimmed by the template
    (MessageRole.ASSISTANT, "user"),  # the template's name for other roles
    (MessageRole.USER, "user and größe"),
)
TEXT = "".join(f"<s>{role.value}\n{text.strip()}<e>\n" for role, text in MESSAGES)
TAIL = "<s>assistant\nthe größe answer<e>\n"


def record(text=TEXT + TAIL, history=MESSAGES, answer=""):
    """Make a record with one token per byte, and one per template mark."""
    template_bytes = (TEXT + answer).encode()
    raw = text.encode()
    ends = [m.end() for m in re.finditer(rb"<[se]>|[\s\S]", raw)]
    ids = [MARK if raw[a:b] in (b"<s>", b"<e>") else 1 for a, b in zip([0, *ends], ends)]  # noqa: B905
    marks = [m.span() for m in re.finditer(rb"<[se]>", template_bytes)]
    sent = [SentMessage(r, message_digest(Message(r, (t,))), len(t), t) for r, t in history]
    return replace(
        make_manifest([], 1, 1),
        text=text,
        token_ids=ids,
        token_ends=ends,
        prompt_tokens_count=len(ids),
        positions=find_positions(sent, template_bytes, marks),
    )


def spans(target, *requested, **options):
    operation = OperationId("operation-1")
    requests = [
        WantedSpan("d", operation, EditMode.FORGET, "[x]", **one) for one in requested or (options,)
    ]
    return Spans(target, {MARK}, b"salt").directives(requests)


def refusal_code(target, *requested, **options):
    with pytest.raises(RejectedError) as caught:
        spans(target, *requested, **options)
    return caught.value.code


def test_messages_are_located_between_template_marks():
    manifest = record()
    found = [
        TEXT.encode()[m.start : m.end].decode() for m in manifest.positions.messages if m.start
    ]
    assert found == ["Be kind.", "user größe", "user", "user and größe"]
    assert manifest.positions.messages[1].lead_chars == 1
    doubtful = SentMessage(MessageRole.USER, bytes(16), 4, "user")
    assert (
        find_positions([doubtful], b"<s>user\nuser<e>", [(0, 3), (12, 15)]).messages[0].start
        is None
    )
    again = MessagePositions.from_wire(manifest.positions.to_wire())
    assert again == manifest.positions


def test_invalid_message_positions_are_rejected():
    raw = record().positions.to_wire()
    for wrong in (raw[:-1], b"\x09" + raw[1:], raw[:1] + b"\x02" + raw[2:]):
        with pytest.raises(CorruptDataError):
            MessagePositions.from_wire(wrong)
    manifest = record()
    moved = MessagePositions(tuple(replace(m, start=10_000) for m in manifest.positions.messages))
    with pytest.raises(CorruptDataError, match="messages are not in order"):
        replace(without_tokens(manifest), positions=moved).check()


def without_tokens(target):
    return replace(target, token_ids=(), token_ends=(), prompt_tokens_count=0)


def test_text_span_is_counted_in_characters_of_its_message():
    (directive,) = spans(record(), text="größe", first=3)
    assert directive.span == (9, 14)
    assert directive.dropped.chars == 5
    (trimmed,) = spans(record(), text="größe", first=1)
    assert trimmed.span == (6, 11), "white space removed by the template must count"


def test_span_after_known_messages_applies_to_record_only():
    """The template's opening of an answer is not part of the answer."""
    (directive,) = spans(record(), text="answer")
    assert directive.message_digest is None
    before = record()
    after = replace(before, directives=(directive,))
    assert rewrite_text(after).decode() == (TEXT + TAIL).replace("answer", "[x]")
    assert pending_directives(after) == (directive,)
    assert not pending_directives(replace(after, text=after.text.replace("answer", "ANSWER")))
    assert not pending_directives(
        replace(after, directives=mark_applied((directive,), (directive,)))
    )
    assert refusal_code(record(), text="assistant\nthe") == "text_not_found"


def test_ambiguous_text_of_known_message_is_not_edited_as_trailing():
    """The client sends that message again, so an edit of the record alone would not last."""
    blank = (MessageRole.ASSISTANT, "  ")
    manifest = record(TEXT + "<s>assistant\n  <e>\n", (*MESSAGES, blank))
    assert manifest.positions.messages[-1].start is None, (
        "white space of a message and of the template cannot be distinguished"
    )
    assert refusal_code(manifest, text="  ") == "text_not_found"
    (named,) = spans(manifest, first=4, chars=(0, 2))
    assert named.span == (0, 2)
    ended = (MessageRole.ASSISTANT, "so  ")
    manifest = record(TEXT + "<s>assistant\nso  <e>\n", (*MESSAGES, ended), "<s>assistant\nso  <e>")
    assert manifest.positions.messages[-1].start is not None
    assert refusal_code(manifest, text="  ") == "text_not_found"
    nothing = (MessageRole.ASSISTANT, "")
    (behind,) = spans(record(history=(*MESSAGES, nothing)), text="answer")
    assert behind.message_digest is None


def test_edits_shift_positions_of_later_messages():
    manifest = record()
    (one,) = spans(manifest, text="and", first=3)
    after = manifest.positions.edited(edits_of([one]))
    assert after.messages[3].is_edited
    assert [m.start for m in after.messages] == [m.start for m in manifest.positions.messages]
    (one,) = spans(manifest, text="größe", first=1)
    after = manifest.positions.edited(edits_of([one]))
    assert (
        after.messages[3].start == manifest.positions.messages[3].start - len("größe".encode()) + 3
    )


def test_token_span_is_widened_to_whole_characters():
    manifest = record()
    at = (TEXT.encode()).rindex("ö".encode())
    start = next(i for i, end in enumerate(manifest.token_ends) if end == at + 1)
    (one,) = spans(manifest, tokens=(start, start + 1))
    assert manifest.text.encode()[slice(*one.at)].decode() == "ö"


def test_marks_sinks_and_template_text_are_protected():
    manifest = record()
    codes = {
        refusal_code(manifest, tokens=(0, 3)): "span_cuts_template",
        refusal_code(manifest, text="Be kind."): "text_not_found",
        refusal_code(manifest, first=0): "system_protected",
        refusal_code(manifest, first=4): "out_of_range",
        refusal_code(manifest, text="größe"): "text_ambiguous",
        refusal_code(manifest, {"first": 3}, {"text": "and"}): "overlapping_spans",
        refusal_code(replace(manifest, positions=None), first=1): "no_messages",
        refusal_code(replace(manifest, positions=None), tokens=(1, 2)): "attention_sink",
    }
    assert all(found == wanted for found, wanted in codes.items()), codes
    head = next(i for i, end in enumerate(manifest.token_ends) if end == TEXT.index("user\n") + 1)
    assert refusal_code(manifest, tokens=(head, head + 2)) == "span_cuts_template"


def test_self_overlapping_text_is_ambiguous():
    tail = TAIL.replace("größe", "la la la")
    manifest = record(TEXT + tail)
    assert refusal_code(manifest, text="la la") == "text_ambiguous"
    assert len(spans(manifest, text="la la", is_every=True)) == 1


def test_each_occurrence_and_each_message_of_a_range_gets_a_directive():
    directives = spans(record(), text="größe", is_every=True)
    assert [(d.message_digest is not None, d.span) for d in directives] == [
        (True, (6, 11)), (True, (9, 14)), (False, None),
    ]  # fmt: skip
    first, *others = spans(record(), first=1, last=3)
    assert first.replacement == "[x]"
    assert [d.replacement for d in others] == [None, None]


def test_record_with_directives_and_settings_round_trips():
    manifest = record()
    whole = without_tokens(
        replace(
            manifest, directives=spans(manifest, text="and"), settings=AgentSettings(rebuilds=True)
        )
    )
    assert decode_manifest(encode_manifest(whole)) == whole


@pytest.mark.parametrize("after_s", [-1.0, float("nan"), float("inf")])
def test_invalid_decay_time_is_rejected(after_s):
    wrong = replace(without_tokens(record()), settings=AgentSettings(decays_after_s=after_s))
    with pytest.raises(CorruptDataError, match="decay time"):
        wrong.check()
