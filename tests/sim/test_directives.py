"""The judge's own reading of directives, and what it knows while no node has answered."""

from tests.sim.directives import (
    Knowledge,
    Told,
    adding,
    concerned,
    removing,
    removing_all,
    rewritten,
)

ASKED = {"role": "user", "content": "look here"}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "much"}
SYSTEM = {"role": "system", "content": "look here"}


def told(text, operation="one", **place):
    return Told(operation, "forget", text, **place)


def test_of_two_for_a_whole_message_the_newer_one_counts():
    state = (told("a", result_of="call-1"), told("b", said=("tool", "much")))
    assert rewritten([RESULT], state) == [{**RESULT, "content": "b"}]
    assert rewritten([RESULT], state[::-1]) == [{**RESULT, "content": "a"}]
    assert concerned([RESULT], state) == [state[1]]


def test_results_stay_and_system_prompts_are_as_they_are():
    state = told(None, said=("user", "look here")), told("", result_of="call-1")
    assert rewritten([SYSTEM, ASKED, RESULT], state) == [SYSTEM, {**RESULT, "content": ""}]


def test_characters_of_one_of_several_that_say_the_same():
    name = "user", "look here"
    state = told("A", said=name, nth=1, span=(0, 4)), told("", said=name, nth=1, span=(5, 9))
    assert [each["content"] for each in rewritten([ASKED, ASKED], state)] == ["look here", "A "]


def test_what_nobody_has_answered_may_be_and_may_yet_come():
    known, one = Knowledge(), told("a", result_of="call-1")
    known.outstanding["add", "one"] = adding([one])
    known.spread(adding([one]))
    assert known.possible == [(), (one,)]
    known.narrow([()], ("node-a", 1.0))
    assert known.possible == [(), (one,)]
    known.settle(adding([one]))
    assert known.possible == [(one,)]


def test_what_is_undone_is_gone_for_certain_once_that_is_answered():
    known, one = Knowledge(), told("a", result_of="call-1")
    known.settle(adding([one]))
    known.spread(removing({"one"}))
    assert known.possible == [(one,), ()]
    known.settle(removing({"one"}))
    assert known.possible == [()]
    known.settle(adding([one]))
    known.settle(removing_all)
    assert known.possible == [()]
