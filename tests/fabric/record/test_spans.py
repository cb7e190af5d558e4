"""Positions of messages in a record's text, and the spans that may be named."""

import re
from dataclasses import replace

import pytest

from fabric.edit_mode import EditMode
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import OperationId
from fabric.record.directed_messages import edits_of, pending, rewritten
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
SAID = (
    (MessageRole.SYSTEM, "Be kind."),
    (MessageRole.USER, " user größe "),  # trimmed by the template
    (MessageRole.ASSISTANT, "user"),  # as the template calls others
    (MessageRole.USER, "user and größe"),
)
TEXT = "".join(f"<s>{role.value}\n{text.strip()}<e>\n" for role, text in SAID)
TAIL = "<s>assistant\nthe größe answer<e>\n"


def record(text=TEXT + TAIL, spoken=SAID, answer=""):
    """Make one with a token to a byte, and one to a mark of the template."""
    shown = (TEXT + answer).encode()
    raw = text.encode()
    ends = [m.end() for m in re.finditer(rb"<[se]>|[\s\S]", raw)]
    ids = [MARK if raw[a:b] in (b"<s>", b"<e>") else 1 for a, b in zip([0, *ends], ends)]  # noqa: B905
    marks = [m.span() for m in re.finditer(rb"<[se]>", shown)]
    told = [SentMessage(r, message_digest(Message(r, (t,))), len(t), t) for r, t in spoken]
    return replace(
        make_manifest([], 1, 1),
        text=text,
        token_ids=ids,
        token_ends=ends,
        prompt_tokens_count=len(ids),
        positions=find_positions(told, shown, marks),
    )


def spans(made, *wanted, **more):
    operation = OperationId("operation-1")
    asked = [WantedSpan("d", operation, EditMode.FORGET, "[x]", **one) for one in wanted or (more,)]
    return Spans(made, {MARK}, b"salt").directives(asked)


def refused(made, *wanted, **more):
    with pytest.raises(RejectedError) as caught:
        spans(made, *wanted, **more)
    return caught.value.code


def test_messages_are_where_they_stand_alone_between_marks():
    made = record()
    found = [TEXT.encode()[m.start : m.end].decode() for m in made.positions.messages if m.start]
    assert found == ["Be kind.", "user größe", "user", "user and größe"]
    assert made.positions.messages[1].lead_chars == 1
    doubtful = SentMessage(MessageRole.USER, bytes(16), 4, "user")
    assert (
        find_positions([doubtful], b"<s>user\nuser<e>", [(0, 3), (12, 15)]).messages[0].start
        is None
    )
    again = MessagePositions.from_wire(made.positions.to_wire())
    assert again == made.positions


def test_what_is_no_table_of_messages_is_refused():
    raw = record().positions.to_wire()
    for wrong in (raw[:-1], b"\x09" + raw[1:], raw[:1] + b"\x02" + raw[2:]):
        with pytest.raises(CorruptDataError):
            MessagePositions.from_wire(wrong)
    made = record()
    moved = MessagePositions(tuple(replace(m, start=10_000) for m in made.positions.messages))
    with pytest.raises(CorruptDataError, match="messages are not in order"):
        replace(without_tokens(made), positions=moved).check()


def without_tokens(made):
    return replace(made, token_ids=(), token_ends=(), prompt_tokens_count=0)


def test_a_text_is_a_span_of_its_message_in_characters():
    (made,) = spans(record(), text="größe", first=3)
    assert made.span == (9, 14)
    assert made.dropped.chars == 5
    (trimmed,) = spans(record(), text="größe", first=1)
    assert trimmed.span == (6, 11), "white space that the template left out counts"


def test_what_follows_the_known_messages_holds_for_the_record_alone():
    """The words by which the template opens an answer are no part of it."""
    (made,) = spans(record(), text="answer")
    assert made.message_digest is None
    before = record()
    after = replace(before, directives=(made,))
    assert rewritten(after).decode() == (TEXT + TAIL).replace("answer", "[x]")
    assert pending(after) == (made,)
    assert not pending(replace(after, text=after.text.replace("answer", "ANSWER")))
    assert not pending(replace(after, directives=mark_applied((made,), (made,))))
    assert refused(record(), text="assistant\nthe") == "text_not_found"


def test_what_may_be_of_a_known_message_is_not_taken_for_what_follows_them_all():
    """Its client sends that message again: an edit of the record alone would not last."""
    blank = (MessageRole.ASSISTANT, "  ")
    made = record(TEXT + "<s>assistant\n  <e>\n", (*SAID, blank))
    assert made.positions.messages[-1].start is None, "white space is not told from the template's"
    assert refused(made, text="  ") == "text_not_found"
    (named,) = spans(made, first=4, chars=(0, 2))
    assert named.span == (0, 2)
    ended = (MessageRole.ASSISTANT, "so  ")
    made = record(TEXT + "<s>assistant\nso  <e>\n", (*SAID, ended), "<s>assistant\nso  <e>")
    assert made.positions.messages[-1].start is not None
    assert refused(made, text="  ") == "text_not_found"
    nothing = (MessageRole.ASSISTANT, "")
    (behind,) = spans(record(spoken=(*SAID, nothing)), text="answer")
    assert behind.message_digest is None


def test_edits_of_the_record_move_what_lies_behind():
    made = record()
    (one,) = spans(made, text="and", first=3)
    after = made.positions.edited(edits_of([one]))
    assert after.messages[3].is_edited
    assert [m.start for m in after.messages] == [m.start for m in made.positions.messages]
    (one,) = spans(made, text="größe", first=1)
    after = made.positions.edited(edits_of([one]))
    assert after.messages[3].start == made.positions.messages[3].start - len("größe".encode()) + 3


def test_tokens_that_end_within_a_character_take_it_in():
    made = record()
    at = (TEXT.encode()).rindex("ö".encode())
    start = next(i for i, end in enumerate(made.token_ends) if end == at + 1)
    (one,) = spans(made, tokens=(start, start + 1))
    assert made.text.encode()[slice(*one.at)].decode() == "ö"


def test_marks_sinks_and_what_the_template_writes_stay():
    made = record()
    codes = {
        refused(made, tokens=(0, 3)): "span_cuts_template",
        refused(made, text="Be kind."): "text_not_found",
        refused(made, first=0): "system_protected",
        refused(made, first=4): "out_of_range",
        refused(made, text="größe"): "text_ambiguous",
        refused(made, {"first": 3}, {"text": "and"}): "overlapping_spans",
        refused(replace(made, positions=None), first=1): "no_messages",
        refused(replace(made, positions=None), tokens=(1, 2)): "attention_sink",
    }
    assert all(found == wanted for found, wanted in codes.items()), codes
    head = next(i for i, end in enumerate(made.token_ends) if end == TEXT.index("user\n") + 1)
    assert refused(made, tokens=(head, head + 2)) == "span_cuts_template"


def test_a_text_that_overlaps_itself_is_there_more_than_once():
    tail = TAIL.replace("größe", "la la la")
    made = record(TEXT + tail)
    assert refused(made, text="la la") == "text_ambiguous"
    assert len(spans(made, text="la la", is_every=True)) == 1


def test_every_place_and_a_range_are_directives_of_their_own():
    made = spans(record(), text="größe", is_every=True)
    assert [(d.message_digest is not None, d.span) for d in made] == [
        (True, (6, 11)), (True, (9, 14)), (False, None),
    ]  # fmt: skip
    first, *others = spans(record(), first=1, last=3)
    assert first.replacement == "[x]"
    assert [d.replacement for d in others] == [None, None]


def test_a_record_with_all_of_it_is_read_as_it_was_written():
    made = record()
    whole = without_tokens(
        replace(made, directives=spans(made, text="and"), settings=AgentSettings(rebuilds=True))
    )
    assert decode_manifest(encode_manifest(whole)) == whole


@pytest.mark.parametrize("after_s", [-1.0, float("nan"), float("inf")])
def test_a_record_that_decays_at_no_time_is_refused(after_s):
    wrong = replace(without_tokens(record()), settings=AgentSettings(decays_after_s=after_s))
    with pytest.raises(CorruptDataError, match="decays"):
        wrong.check()
