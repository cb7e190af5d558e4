"""Appending to a remembered text never repeats or splits its tokens."""

import pytest

from node.prompt.continued_prompt import append

END = "<|im_end|>"
TAIL = f"{END}\n<|im_start|>user\nhi{END}\n"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("an answer", "an answer" + TAIL),  # cut by a limit
        ("an answer" + END, "an answer" + TAIL),
        (f"an answer{END}\n", "an answer" + TAIL),
        ("an answer\n", "an answer\n" + TAIL),
        ("an answer<|im", "an answer<|im" + TAIL[4:]),
        ("hi", "hi" + TAIL),
    ],
)
def test_end_of_an_answer_is_appended_once(stored, expected):
    assert append(stored, TAIL) == expected
