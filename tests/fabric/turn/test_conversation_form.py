"""Which rewritings of a history leave a conversation the same, and which make it another."""

from dataclasses import replace

import pytest

from fabric.codec import from_plain, to_plain
from fabric.errors import RejectedError
from fabric.turn.conversation_form import ConversationForm, form_chain
from fabric.turn.messages import Message, MessageRole, ToolUse
from fabric.turn.passing_texts import without_passing_texts

SYSTEM, USER = MessageRole.SYSTEM, MessageRole.USER
ANSWER = Message(MessageRole.ASSISTANT, ("It is done.",))
CALL = Message(
    MessageRole.ASSISTANT, ("I look.",), uses=(ToolUse("read", {"path": "a", "n": 1}, "call-1"),)
)
LONG = "The archive has nine hundred lanterns, and each of them has a keeper. " * 10
TOOLS = [{"type": "function", "function": {"name": "read", "description": "On 2026-11-28."}}]
TOMORROW = [{"type": "function", "function": {"name": "read", "description": "On 2026-11-29."}}]


def said(role, text):
    return Message(role, (text,))


def result(text):
    return Message(MessageRole.TOOL, (text,), result_of="call-1")


BEFORE = [
    said(SYSTEM, "You help.\nIt is 2026-11-28 09:41:07."),
    said(USER, "What does it say?"),
    CALL,
    result(LONG),
]
FORM = form_chain(BEFORE, TOOLS).answered(ANSWER)


def after(*changes):
    """Return the messages of the next turn, some of them changed: pairs of place and message."""
    messages = [*BEFORE, ANSWER, said(USER, "And now?")]
    for place, message in changes:
        messages[place] = message
    return messages


def goes_on(messages, tools=TOOLS):
    return form_chain(messages, tools).continues(FORM)


def test_the_next_turn_continues_the_form():
    assert goes_on(after())
    chain = form_chain(after(), TOOLS)
    assert FORM.digest in chain.beginnings()
    assert next(iter(chain.turns())) == FORM.digest


@pytest.mark.parametrize(
    "text",
    [
        "You help.\nIt is 2026-11-28 10:02:59.",
        "You help.\nIt is 2026-11-29T10:02:59.123+01:00.",
        "You help.\nIt is Saturday, November 28, 2026 9:41 PM.",
        "You help.\nIt is Sat Nov 28 09:41:07 UTC 2026.",
        "You help.\nIt is 28 Nov 2026.",
        "You help.\nIt is 1795859000.",
        "You help.\nToday's date: the day of the lantern\nIt is 11/28/2026.",
        "You help.\n<system-reminder>Be kind.</system-reminder>\nIt is 09:41.",
        "You help.\nIt  is 09:41.\n",
    ],
)
def test_a_clock_or_a_reminder_in_the_system_prompt_leaves_it_the_same(text):
    assert goes_on(after((0, said(SYSTEM, text))))


@pytest.mark.parametrize(
    "message",
    [
        said(USER, "What does it say?\n<system-reminder>\nBe kind.\n</system-reminder>"),
        said(USER, "<environment_details>2 files</environment_details>What does it say?"),
    ],
)
def test_a_reminder_in_a_question_leaves_it_the_same(message):
    assert goes_on(after((1, message)))


def test_a_message_that_is_a_reminder_only_does_not_count():
    reminder = said(USER, "<system-reminder>Use the list.</system-reminder>")
    assert goes_on([BEFORE[0], reminder, *after()[1:]])
    assert form_chain([reminder], None).whole == form_chain([], None).whole


def test_thoughts_ids_and_the_spelling_of_calls_do_not_count():
    call = replace(
        CALL,
        texts=(" I look.\n",),
        reasoning="Hm.",
        uses=(ToolUse("read", '{"n": 1, "path": "a"}', "other"),),
    )
    assert goes_on(after((2, call)))


@pytest.mark.parametrize("text", ["[elided]", "", "[Old tool result content cleared]", "x" * 200])
def test_a_placeholder_stands_for_a_result_in_both_directions(text):
    assert goes_on(after((3, result(text))))
    elided = form_chain([*BEFORE[:3], result(text)], TOOLS).answered(ANSWER)
    assert form_chain(after(), TOOLS).continues(elided)


def test_a_reminder_in_a_result_leaves_it_the_same():
    assert goes_on(after((3, result(f"{LONG}<system-reminder>Beware.</system-reminder>"))))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, said(SYSTEM, "You harm.\nIt is 2026-11-28 09:41:07.")),
        (0, said(USER, "You help.\nIt is 2026-11-28 09:41:07.")),
        (0, said(SYSTEM, "You help.\nIt is 2026-11-28 09:41:07.\n<system-reminder>open")),
        (1, said(USER, "What did it say?")),
        (1, said(USER, "Current time in Paris?")),
        (2, replace(CALL, texts=("I read.",))),
        (2, replace(CALL, uses=(ToolUse("read", {"path": "b", "n": 1}),))),
        (2, replace(CALL, uses=())),
        (3, result(LONG.replace("nine", "five"))),
        (3, result(LONG[:201])),
        (3, said(USER, "It is read.")),
        (4, replace(ANSWER, texts=("It is undone.",))),
        (4, said(USER, "It is done.")),
    ],
)
def test_any_other_change_makes_another_conversation(place, message):
    assert not goes_on(after((place, message)))


def test_short_results_are_no_placeholders_of_each_other():
    short = form_chain([*BEFORE[:3], result("42")], TOOLS).answered(ANSWER)
    assert not form_chain(after((3, result("43"))), TOOLS).continues(short)


def test_more_or_fewer_messages_make_another_conversation():
    assert not goes_on(BEFORE)
    assert not goes_on([*BEFORE, said(USER, "And now?")])
    assert not goes_on([*BEFORE[:2], *after()[4:]])
    assert not goes_on([*BEFORE[:3], result("[elided]"), result("[elided]"), *after()[4:]])
    assert not goes_on(after(), tools=None)
    assert goes_on(after(), tools=TOMORROW)


def test_a_question_alone_is_no_evidence():
    first = form_chain(BEFORE[:2], None)
    assert list(first.beginnings()) == list(first.turns()) == []
    assert not form_chain(BEFORE[:2], None).continues(first.whole)


def test_a_question_in_one_line_keeps_its_words():
    assert without_passing_texts("Date: today?", drops_lines=False) == "Date: today?"
    assert without_passing_texts("Date: today\nHelp.", drops_lines=True) == "Help."


def test_hostile_texts_take_time_by_their_length_only():
    for text in ("<reminder>" * 50_000, "1:" * 200_000, "Sat, " * 100_000, "\u0130<reminder>" * 9):
        assert without_passing_texts(text, drops_lines=True) is not None
    assert without_passing_texts("\u0130<reminder>x</reminder>y", drops_lines=True) == "\u0130 y"


def test_a_form_travels_and_damaged_bytes_are_refused():
    assert from_plain(ConversationForm, to_plain(FORM)) == FORM
    raw = to_plain(FORM)
    for damaged in (b"", raw[:-1], raw + b"\0"):
        with pytest.raises(RejectedError, match="form"):
            from_plain(ConversationForm, damaged)
