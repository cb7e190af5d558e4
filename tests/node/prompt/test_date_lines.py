"""Only date lines leave the system prompt, and only on request."""

import pytest

from node.prompt.prompt_boundaries import move_date_lines
from tests.node.prompt.test_restored_answers import asking, restored
from tests.support.agent_traffic import Driver, Talk, corpus, words
from tests.support.conversations import said
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, write_shape


def moved(system, question="Why?"):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    made = move_date_lines(said(messages))
    return ["".join(message.texts) for message in made]


@pytest.mark.parametrize(
    "line",
    [
        *("Today's date: 2026-11-23", "Today is Monday.", "  - Today\u2019s date is the 23rd"),
        *("Current date and time: 10:36", "The current time is 10:36.", "**Date:** never"),
        *("# Current Date", "date: 2026-11-23"),
    ],
)
def test_a_line_that_tells_the_date_comes_first_in_the_first_question(line):
    assert moved(f"Be brief.\n{line}\nBe kind.") == [
        "Be brief.\nBe kind.",
        f"{line.strip()}\n\nWhy?",
    ]
    assert moved(f"{line}\nBe brief.\n\n{line}")[1] == f"{line.strip()}\n{line.strip()}\n\nWhy?"


@pytest.mark.parametrize(
    "system",
    [
        *("Be brief today.", "Say what today's date means to you.", "update: yes", "Dates: many"),
        *("Today's date: 2026-11-23", "Today is " + "long " * 60),
    ],
)
def test_other_lines_stay_and_so_does_one_that_is_alone(system):
    assert moved(system) == [system, "Why?"]


def test_it_is_done_where_it_is_asked_for_and_told():
    system = {"role": "system", "content": "Be brief.\nToday is Monday."}
    for told, options, is_moved in (
        ({}, {}, False),
        ({}, {"move_dates": True}, True),
        ({"move_dates": True}, {}, True),
        ({"move_dates": True}, {"move_dates": False}, False),
    ):
        request = asking(**options)
        user = request.messages[-1]
        made = restored(request, told=told, messages=(*said([system]), user))
        assert made.note == ("; moved dates" if is_moved else "")
        assert ("Monday" in made.request.messages[-1].texts[0]) is is_moved
        assert made.request.template_options == {}


@pytest.mark.slow
def test_tomorrows_conversation_begins_as_todays(tmp_path):
    shape = SHAPES["chatml"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    cached = {}
    with scripted() as script, running(tmp_path, str(model)) as service:
        for moves in (True, False):
            driver = Driver(service, shape, script, options={"move_dates": moves})
            for day in range(2):
                system = f"Today is day {day} of the year.\n{words(1 + moves, 300)}"
                Talk(driver, f"day-{day}", system).ask()
            cached[moves] = driver.turns[-1].cached
    assert cached[True] > 256
    assert cached[False] < 20
