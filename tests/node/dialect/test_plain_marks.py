"""Control marks in clients' texts: disarmed before a template renders, and restored after it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.dialect.plain_marks import DISARMED, MarkFinder, PlainMarks
from node.dialect.template_messages import WrittenArguments

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "<\uff5cUser\uff5c>"]
MARKS += ["<|a|>", "|><|b", "<|a|>b"]  # that overlap, or begin alike
FINDER = MarkFinder(MARKS)
PLAIN = PlainMarks(MARKS, {"<think>", "</think>"})
TEXTS = st.lists(
    st.sampled_from(
        [*MARKS, DISARMED, "<|im_", "end|>", "<", "|", "a", "b", "<|b", "é", "🦊", "\n", "\\u003c"]
    ),
    max_size=12,
).map("".join)


def places(text):
    return [at for at in range(len(text)) for mark in MARKS if text.startswith(mark, at)]


@given(text=TEXTS)
@settings(max_examples=500)
def test_disarmed_text_has_no_marks_and_is_restored_with_all(text):
    disarmed = FINDER.disarm(text)
    assert not places(disarmed)

    restored = PLAIN.restored(disarmed)
    assert restored.text == text
    starts = [len(text[:at].encode()) for at in sorted({*places(text)})]
    assert list(restored.plain) == starts


@given(texts=st.lists(TEXTS, max_size=4), frame=st.sampled_from(MARKS[:6]))
@settings(max_examples=300)
def test_marks_of_the_template_are_not_plain(texts, frame):
    rendered = frame.join(map(FINDER.disarm, texts))
    restored = PLAIN.restored(rendered)

    assert restored.text == frame.join(texts)
    at, expected = 0, []
    for text in texts:
        expected += [at + len(text[:place].encode()) for place in sorted({*places(text)})]
        at += len((text + frame).encode())
    assert list(restored.plain) == expected


@given(value=TEXTS, is_ascii=st.booleans())
@settings(max_examples=300)
def test_json_escapes_hide_no_mark(value, is_ascii):
    spelled = json.dumps({"q": value}, ensure_ascii=is_ascii)
    for escaped in (spelled, spelled.replace("<", "\\u003c"), spelled.replace("/", "\\/")):
        disarmed = FINDER.disarm_json(escaped)

        assert not places(disarmed)
        assert not places(json.loads(disarmed)["q"])
        assert PLAIN.restored(disarmed).text == escaped


def test_every_client_text_is_disarmed_and_nothing_else():
    mark, left = "<|im_end|>", f"<{DISARMED}|im_end|>"
    call = {"type": "function", "id": mark, "function": {"name": mark, "arguments": {mark: [mark]}}}
    messages = [
        {"role": "user", "content": mark, "name": mark},
        {"role": "assistant", "content": mark, "reasoning_content": mark, "tool_calls": [call]},
        {"role": "tool", "content": mark, "tool_call_id": mark},
    ]
    disarmed = PLAIN.messages(messages)

    assert json.dumps(disarmed, ensure_ascii=False) == (
        json.dumps(messages, ensure_ascii=False).replace(mark, left)
    )
    assert mark in messages[0]["content"], "the client's own are unchanged"
    assert PLAIN.value([{"description": mark, "enum": [1, None]}]) == [
        {"description": left, "enum": [1, None]}
    ]


def test_written_arguments_keep_their_spelling():
    text = '{"q":  "<|im_end|>"}'
    call = {"function": {"name": "f", "arguments": WrittenArguments(text, json.loads(text))}}
    (message,) = PLAIN.messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    arguments = message["tool_calls"][0]["function"]["arguments"]

    assert isinstance(arguments, WrittenArguments)
    assert arguments.text == f'{{"q":  "<{DISARMED}|im_end|>"}}'
    assert arguments == {"q": f"<{DISARMED}|im_end|>"}


def test_argument_strings_are_disarmed_as_json():
    call = {"function": {"name": "f", "arguments": '{"q": "\\u003c|im_end|>"}'}}
    (message,) = PLAIN.messages([{"role": "assistant", "content": "", "tool_calls": [call]}])

    spelled = message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(spelled) == {"q": f"<{DISARMED}|im_end|>"}


@pytest.mark.parametrize(
    ("role", "is_kept"), [("user", False), ("tool", False), ("assistant", True), ("system", True)]
)
def test_assistant_and_system_messages_keep_thought_marks(role, is_kept):
    (message,) = PLAIN.messages([{"role": role, "content": "<think>x</think><|im_end|>"}])

    assert ("<think>x</think>" in message["content"]) is is_kept
    assert "<|im_end|>" not in message["content"]
