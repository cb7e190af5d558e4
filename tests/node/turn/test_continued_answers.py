"""Continued answers are as warm as any turn, for every template."""

from dataclasses import replace

import pytest

from tests.support.agent_traffic import SYSTEM, Driver, corpus, words
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, ScriptedAnswer, write_shape

QUESTIONS = [{"role": "user", "content": words(seed, 40)} for seed in (1, 2)]
PARTIAL, REST = "It begins " + words(3, 20), " and ends."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "shape"),
    [("full", "thought_opened"), ("full", "thought_closed"), ("recurrent", "thought_closed")],
    ids=" ".join,
)
def test_turn_after_a_continued_answer_is_warm(tmp_path, weights, shape):
    model = write_shape(tmp_path / "model", SHAPES[shape], weights, corpus())
    answers = replace(
        SHAPES[shape], say=lambda scripted_answer: scripted_answer.text
    )  # its thought has ended
    messages = [{"role": "system", "content": SYSTEM}, QUESTIONS[0]]
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, answers, script, continues=True)
        partial = {"role": "assistant", "content": PARTIAL}
        rest = driver.ask("one", [*messages, partial], ScriptedAnswer(REST), None)
        driver.continues = False
        whole = {"role": "assistant", "content": PARTIAL + rest["content"]}
        driver.ask("one", [*messages, whole, QUESTIONS[1]], ScriptedAnswer("Yes."), None)

    assert rest == {"role": "assistant", "content": REST}
    first, second = driver.turns
    assert second.agent == first.agent
    assert second.possible > len(SYSTEM) / 8
    assert second.possible - second.cached < 16
