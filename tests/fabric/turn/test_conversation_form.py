"""Rewrites of a history that continue a conversation, and rewrites that start another."""

from dataclasses import replace

import pytest

from fabric.codec import from_plain, to_plain
from fabric.errors import RejectedError
from fabric.turn.conversation_form import ConversationForm, form_chain, without_passing_texts
from fabric.turn.messages import Message, MessageRole, ToolUse

SYSTEM, USER = MessageRole.SYSTEM, MessageRole.USER
ANSWER = Message(MessageRole.ASSISTANT, ("It is done.",))
CALL = Message(
    MessageRole.ASSISTANT, ("I look.",), uses=(ToolUse("read", {"path": "a", "n": 1}, "call-1"),)
)
LONG = "The archive has nine hundred lanterns, and each of them has a keeper. " * 10
TOOLS = [{"type": "function", "function": {"name": "read", "description": "On 2026-11-28."}}]
TOMORROW = [{"type": "function", "function": {"name": "read", "description": "On 2026-11-29."}}]


def message_of(role, text):
    return Message(role, (text,))


def result(text):
    return Message(MessageRole.TOOL, (text,), result_of="call-1")


BEFORE = [
    message_of(SYSTEM, "You help.\nIt is 2026-11-28 09:41:07."),
    message_of(USER, "What does it say?"),
    CALL,
    result(LONG),
]
FORM = form_chain(BEFORE, TOOLS).form_with(ANSWER)


def after(*changes):
    """Return the next turn's messages; `changes` are pairs of position and replaced message."""
    messages = [*BEFORE, ANSWER, message_of(USER, "And now?")]
    for place, message in changes:
        messages[place] = message
    return messages


def continues_form(messages, tools=TOOLS):
    return form_chain(messages, tools).continues(FORM)


def test_next_turn_continues_the_form():
    assert continues_form(after())
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
def test_clock_or_reminder_in_system_prompt_continues_the_form(text):
    assert continues_form(after((0, message_of(SYSTEM, text))))


@pytest.mark.parametrize(
    "message",
    [
        message_of(USER, "What does it say?\n<system-reminder>\nBe kind.\n</system-reminder>"),
        message_of(USER, "<environment_details>2 files</environment_details>What does it say?"),
    ],
)
def test_reminder_in_user_message_continues_the_form(message):
    assert continues_form(after((1, message)))


def test_reminder_only_message_is_ignored():
    reminder = message_of(USER, "<system-reminder>Use the list.</system-reminder>")
    assert continues_form([BEFORE[0], reminder, *after()[1:]])
    assert form_chain([reminder], None).whole == form_chain([], None).whole


def test_reasoning_call_ids_and_argument_spelling_are_ignored():
    call = replace(
        CALL,
        texts=(" I look.\n",),
        reasoning="Hm.",
        uses=(ToolUse("read", '{"n": 1, "path": "a"}', "other"),),
    )
    assert continues_form(after((2, call)))


@pytest.mark.parametrize("text", ["[elided]", "", "[Old tool result content cleared]", "x" * 200])
def test_placeholder_matches_a_result_in_both_directions(text):
    assert continues_form(after((3, result(text))))
    elided = form_chain([*BEFORE[:3], result(text)], TOOLS).form_with(ANSWER)
    assert form_chain(after(), TOOLS).continues(elided)


def test_reminder_in_tool_result_continues_the_form():
    assert continues_form(after((3, result(f"{LONG}<system-reminder>Beware.</system-reminder>"))))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, message_of(SYSTEM, "You harm.\nIt is 2026-11-28 09:41:07.")),
        (0, message_of(USER, "You help.\nIt is 2026-11-28 09:41:07.")),
        (0, message_of(SYSTEM, "You help.\nIt is 2026-11-28 09:41:07.\n<system-reminder>open")),
        (1, message_of(USER, "What did it say?")),
        (1, message_of(USER, "Current time in Paris?")),
        (2, replace(CALL, texts=("I read.",))),
        (2, replace(CALL, uses=(ToolUse("read", {"path": "b", "n": 1}),))),
        (2, replace(CALL, uses=())),
        (3, result(LONG.replace("nine", "five"))),
        (3, result(LONG[:201])),
        (3, message_of(USER, "It is read.")),
        (4, replace(ANSWER, texts=("It is undone.",))),
        (4, message_of(USER, "It is done.")),
    ],
)
def test_any_other_change_starts_another_conversation(place, message):
    assert not continues_form(after((place, message)))


def test_short_results_are_not_placeholders():
    short = form_chain([*BEFORE[:3], result("42")], TOOLS).form_with(ANSWER)
    assert not form_chain(after((3, result("43"))), TOOLS).continues(short)


def test_more_or_fewer_messages_start_another_conversation():
    assert not continues_form(BEFORE)
    assert not continues_form([*BEFORE, message_of(USER, "And now?")])
    assert not continues_form([*BEFORE[:2], *after()[4:]])
    assert not continues_form([*BEFORE[:3], result("[elided]"), result("[elided]"), *after()[4:]])
    assert not continues_form(after(), tools=None)
    assert continues_form(after(), tools=TOMORROW)


def test_first_question_alone_identifies_no_conversation():
    first = form_chain(BEFORE[:2], None)
    assert list(first.beginnings()) == list(first.turns()) == []
    assert not form_chain(BEFORE[:2], None).continues(first.whole)


def test_single_line_question_keeps_its_words():
    assert without_passing_texts("Date: today?", drops_lines=False) == "Date: today?"
    assert without_passing_texts("Date: today\nHelp.", drops_lines=True) == "Help."


def test_hostile_texts_are_processed_in_linear_time():
    for text in ("<reminder>" * 50_000, "1:" * 200_000, "Sat, " * 100_000, "\u0130<reminder>" * 9):
        assert without_passing_texts(text, drops_lines=True) is not None
    assert without_passing_texts("\u0130<reminder>x</reminder>y", drops_lines=True) == "\u0130 y"


def test_form_round_trips_and_damaged_bytes_are_rejected():
    assert from_plain(ConversationForm, to_plain(FORM)) == FORM
    raw = to_plain(FORM)
    for damaged in (b"", raw[:-1], raw + b"\0"):
        with pytest.raises(RejectedError, match="form"):
            from_plain(ConversationForm, damaged)
