"""After an edit, answers are restored at their own place only."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.turn.messages import Message, MessageRole, ToolUse
from tests.node.prompt.test_restored_answers import remember, request_of, restore

USER, TOOL, ASSISTANT = MessageRole.USER, MessageRole.TOOL, MessageRole.ASSISTANT
QUESTION = [Message(USER, ("Do it.",))]


def call(path, number):
    return Message(
        ASSISTANT, ("",), reasoning=f"Thought {number}.", uses=(ToolUse("read", {"path": path}),)
    )


def tool_loop(paths):
    """Return a loop of calls and the answers remembered of it, turn by turn."""
    messages, answers = list(QUESTION), {}
    for number, path in enumerate(paths):
        answer = call(path, number)
        answers = remember(answers, messages, answer)
        messages += [answer, Message(TOOL, (f"{path} holds {number}",), result_of=f"id-{number}")]
    return messages, answers


def without_thoughts(messages):
    """Return messages as a client sends them, which drops thoughts."""
    return tuple(replace(message, reasoning=None) for message in messages)


def thoughts(messages):
    return [message.reasoning for message in messages if message.role is ASSISTANT]


def restored_thoughts(messages, answers):
    return thoughts(
        restore(request_of(), answers, messages=without_thoughts(messages)).request.messages
    )


CLEARED = Message(TOOL, ("[cleared]",))


def clear_messages(messages, *numbers):
    return [CLEARED if at in numbers else message for at, message in enumerate(messages)]


def test_answers_are_restored_after_a_cleared_tool_result():
    messages, answers = tool_loop("abcdef")
    assert restored_thoughts(clear_messages(messages, 2, 4), answers) == thoughts(messages)


def test_answers_are_restored_after_a_removed_call():
    messages, answers = tool_loop("abcdef")
    del messages[3:5]
    assert restored_thoughts(messages, answers) == thoughts(messages)


def test_answers_are_restored_after_a_changed_first_message():
    messages, answers = tool_loop("abcdef")
    messages[0] = Message(USER, ("Do something else.",))
    assert restored_thoughts(messages, answers) == thoughts(messages)


def test_complete_repeated_calls_are_matched_by_order():
    messages, answers = tool_loop("abababb")
    assert restored_thoughts(clear_messages(messages, 2, 4), answers) == thoughts(messages)


def test_incomplete_repeated_calls_are_not_matched():
    messages, answers = tool_loop("aaacd")
    messages = clear_messages(messages, 0)
    del messages[3:5]
    assert restored_thoughts(messages, answers) == [None, None, "Thought 3.", "Thought 4."]


def test_repeated_calls_with_ids_are_matched_by_id():
    messages, answers = list(QUESTION), {}
    for number in range(4):
        answer = call("a", number)
        answer = replace(answer, uses=(replace(answer.uses[0], id=f"id-{number}"),))
        answers = remember(answers, messages, answer)
        messages += [answer, Message(TOOL, ("x",), result_of=f"id-{number}")]
    messages = clear_messages(messages, 0)
    del messages[3:5]
    assert restored_thoughts(messages, answers) == ["Thought 0.", "Thought 2.", "Thought 3."]


def test_answers_after_an_edit_are_remembered_at_their_new_place():
    messages, answers = tool_loop("abcdef")
    edited = clear_messages(messages, 2)
    result = restore(request_of(), answers, messages=without_thoughts(edited))
    answer = call("g", 6)
    known = {**answers, **result.answers}
    answers = remember(known, result.request.messages, answer)
    again = restore(request_of(), answers, messages=without_thoughts([*edited, answer, CLEARED]))
    assert thoughts(again.request.messages) == [*thoughts(messages), "Thought 6."]
    assert again.answers.keys() <= answers.keys()


def test_answers_with_other_neighbours_are_not_matched():
    """Such as an equal answer in an older branch of the conversation."""
    _, answers = tool_loop("abc")
    other = [Message(USER, ("Else.",)), *tool_loop("x")[0], call("b", 9), *tool_loop("y")[0]]
    assert restored_thoughts(other, answers) == [None, None, None]


def test_stripped_thought_is_not_restored_after_an_edit():
    messages, answers = tool_loop("abc")
    edited = without_thoughts(clear_messages(messages, 2))
    edited = tuple(replace(each, is_stripped=each.role is ASSISTANT) for each in edited)
    result = restore(request_of(), answers, messages=edited)
    assert thoughts(result.request.messages) == [None, None, None]


@given(st.data())
@settings(max_examples=200)
def test_no_edit_restores_a_thought_to_another_answer(data):
    """After any removal, clearing or insertion."""
    paths = data.draw(st.lists(st.sampled_from("aab"), min_size=1, max_size=9))
    messages, answers = tool_loop(paths)
    kept = [Message(USER, ("Before.",))]
    for message in messages:
        if data.draw(st.sampled_from([True, True, True, False])):
            is_cleared = message.role is TOOL and data.draw(st.booleans())
            kept.append(CLEARED if is_cleared else message)
    for found, own in zip(restored_thoughts(kept, answers), thoughts(kept), strict=True):
        assert found in (None, own)


@pytest.mark.parametrize("text", ["", "Well. "], ids=["no words", "words"])
def test_white_space_and_spelling_are_restored_after_an_edit(text):
    messages, answers = list(QUESTION), {}
    for path in "ab":
        use = ToolUse("read", '{"path" :"' + path + '"}', f"own-{path}")
        answer = Message(ASSISTANT, (f"\n\n{text}{path}",), uses=(use,))
        answers = remember(answers, messages, answer)
        messages += [answer, Message(TOOL, (f"{path} held",), result_of=f"own-{path}")]
    edited = []
    for message in clear_messages(messages, 0):
        if message.role is ASSISTANT:
            (use,) = message.uses
            use = replace(use, arguments={"path": use.arguments[-3]}, id=f"x-{use.id}")
            edited.append(replace(message, texts=(message.texts[0].strip(),), uses=(use,)))
        else:
            edited.append(message)
    result = restore(request_of(), answers, messages=without_thoughts(edited)).request.messages
    assert [each.texts for each in result if each.role is ASSISTANT] == [
        (f"\n\n{text}a",),
        (f"\n\n{text}b",),
    ]
    assert [each.uses[0].id for each in result if each.role is ASSISTANT] == ["own-a", "own-b"]
