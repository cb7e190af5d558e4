"""Date lines, and only they, leave the system prompt on request."""

import pytest

from node.prompt.prompt_boundaries import move_date_lines
from tests.node.prompt.test_restored_answers import request_of, restore
from tests.support.agent_traffic import Driver, Talk, corpus, words
from tests.support.conversations import read_messages
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, write_shape


def move_lines(system, question="Why?"):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    result = move_date_lines(read_messages(messages))
    return ["".join(message.texts) for message in result]


@pytest.mark.parametrize(
    "line",
    [
        *("Today's date: 2026-11-23", "Today is Monday.", "  - Today\u2019s date is the 23rd"),
        *("Current date and time: 10:36", "The current time is 10:36.", "**Date:** never"),
        *("# Current Date", "date: 2026-11-23"),
    ],
)
def test_date_line_moves_to_the_start_of_the_first_question(line):
    assert move_lines(f"Be brief.\n{line}\nBe kind.") == [
        "Be brief.\nBe kind.",
        f"{line.strip()}\n\nWhy?",
    ]
    assert (
        move_lines(f"{line}\nBe brief.\n\n{line}")[1] == f"{line.strip()}\n{line.strip()}\n\nWhy?"
    )


@pytest.mark.parametrize(
    "system",
    [
        *("Be brief today.", "Say what today's date means to you.", "update: yes", "Dates: many"),
        *("Today's date: 2026-11-23", "Today is " + "long " * 60),
    ],
)
def test_other_lines_and_a_sole_line_stay(system):
    assert move_lines(system) == [system, "Why?"]


def test_date_lines_move_only_on_request_and_are_noted():
    system = {"role": "system", "content": "Be brief.\nToday is Monday."}
    for defaults, options, is_moved in (
        ({}, {}, False),
        ({}, {"move_dates": True}, True),
        ({"move_dates": True}, {}, True),
        ({"move_dates": True}, {"move_dates": False}, False),
    ):
        request = request_of(**options)
        user = request.messages[-1]
        result = restore(request, defaults=defaults, messages=(*read_messages([system]), user))
        assert result.note == ("; moved dates" if is_moved else "")
        assert ("Monday" in result.request.messages[-1].texts[0]) is is_moved
        assert result.request.template_options == {}


@pytest.mark.slow
def test_conversations_of_two_days_share_their_prefix(tmp_path):
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
