"""Continued answers are as warm as any turn, for every template."""

from dataclasses import replace

import pytest

from tests.support.agent_traffic import SYSTEM, Driver, corpus, words
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, Said, write_shape

QUESTIONS = [{"role": "user", "content": words(seed, 40)} for seed in (1, 2)]
BEGUN, REST = "It begins " + words(3, 20), " and ends."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "shape"),
    [("full", "thought_opened"), ("full", "thought_closed"), ("recurrent", "thought_closed")],
    ids=" ".join,
)
def test_the_next_turn_is_the_same_agents_and_computes_what_is_new(tmp_path, weights, shape):
    model = write_shape(tmp_path / "model", SHAPES[shape], weights, corpus())
    answers = replace(SHAPES[shape], say=lambda said: said.text)  # what it thought is over
    asked = [{"role": "system", "content": SYSTEM}, QUESTIONS[0]]
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, answers, script, continues=True)
        begun = {"role": "assistant", "content": BEGUN}
        rest = driver.ask("one", [*asked, begun], Said(REST), None)
        driver.continues = False
        whole = {"role": "assistant", "content": BEGUN + rest["content"]}
        driver.ask("one", [*asked, whole, QUESTIONS[1]], Said("Yes."), None)

    assert rest == {"role": "assistant", "content": REST}
    first, second = driver.turns
    assert second.agent == first.agent
    assert second.possible > len(SYSTEM) / 8
    assert second.possible - second.cached < 16
