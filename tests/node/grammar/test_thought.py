"""Where a thought begins and ends, by text."""

import pytest

from node.grammar.thought import Beginning, ThoughtEndDetector, ThoughtMarks, beginning_of

MARKS = ThoughtMarks("<think>", ("</think>",), 3)
HEADERS = ThoughtMarks("", ("<|channel|>final", "<|message|>"), is_always=True)


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("", Beginning.EITHER),
        ("\n<think>\n", Beginning.THOUGHT),
        ("<think>\n\n</think>\n\n", Beginning.TEXT),
        ("<think>a</think><think>", Beginning.THOUGHT),
    ],
)
def test_the_prompts_end_says_whether_a_thought_comes(begun, expected):
    assert beginning_of(MARKS, begun) is expected


def test_models_without_thoughts_and_without_a_token_for_them_begin_with_text():
    assert beginning_of(None, "<think>") is Beginning.TEXT
    assert beginning_of(ThoughtMarks("<think>", ("</think>",)), "a") is Beginning.TEXT


@pytest.mark.parametrize("pieces", [["</think>"], ["a </th", "ink", ">\n"], list("x</think>")])
def test_the_end_is_found_in_whatever_tokens_it_comes(pieces):
    end = ThoughtEndDetector(MARKS)
    found = [end.push(piece.encode()) for piece in ["</think", "a", *pieces]]
    assert any(found)
    assert found[: found.index(True)] == [False] * found.index(True)


def test_an_answer_of_messages_with_headers_begins_with_one():
    assert beginning_of(HEADERS, "") is Beginning.THOUGHT
    text = "<|channel|>analysis<|message|>a final<|message|>b<|end|><|start|>assistant"
    end = ThoughtEndDetector(HEADERS)
    assert not any(end.push(char.encode()) for char in text)
    found = [end.push(c.encode()) for c in "<|channel|>final <|constrain|>json<|message|>"]
    assert found.index(True) == len(found) - 1


def test_a_long_thought_is_not_kept():
    end = ThoughtEndDetector(MARKS)
    assert not any(end.push(b"the cat sat " * 40) for _ in range(100))
    assert len(end._tail) < 1_000
    assert end.push(b"</think>")
