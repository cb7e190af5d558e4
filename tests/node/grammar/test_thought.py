"""Detection of the beginning and end of a thought in text."""

import pytest

from node.grammar.thought import Beginning, ThoughtEndDetector, ThoughtMarks, beginning_of

MARKS = ThoughtMarks("<think>", ("</think>",), 3)
HEADERS = ThoughtMarks("", ("<|channel|>final", "<|message|>"), is_always=True)


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("", Beginning.EITHER),
        ("\n<think>\n", Beginning.THOUGHT),
        ("<think>\n\n</think>\n\n", Beginning.TEXT),
        ("<think>a</think><think>", Beginning.THOUGHT),
    ],
)
def test_beginning_of_the_answer_follows_from_the_prompts_end(prompt_end, expected):
    assert beginning_of(MARKS, prompt_end) is expected


def test_answer_starts_with_text_without_a_thought_token():
    assert beginning_of(None, "<think>") is Beginning.TEXT
    assert beginning_of(ThoughtMarks("<think>", ("</think>",)), "a") is Beginning.TEXT


@pytest.mark.parametrize("pieces", [["</think>"], ["a </th", "ink", ">\n"], list("x</think>")])
def test_thought_end_is_found_in_any_tokenization(pieces):
    end = ThoughtEndDetector(MARKS)
    found = [end.push(piece.encode()) for piece in ["</think", "a", *pieces]]
    assert any(found)
    assert found[: found.index(True)] == [False] * found.index(True)


def test_answers_with_message_headers_start_with_a_thought():
    assert beginning_of(HEADERS, "") is Beginning.THOUGHT
    text = "<|channel|>analysis<|message|>a final<|message|>b<|end|><|start|>assistant"
    end = ThoughtEndDetector(HEADERS)
    assert not any(end.push(char.encode()) for char in text)
    found = [end.push(c.encode()) for c in "<|channel|>final <|constrain|>json<|message|>"]
    assert found.index(True) == len(found) - 1


def test_detector_keeps_a_bounded_tail_of_a_long_thought():
    end = ThoughtEndDetector(MARKS)
    assert not any(end.push(b"the cat sat " * 40) for _ in range(100))
    assert len(end._tail) < 1_000
    assert end.push(b"</think>")
