"""The judge's own model of directives, and the states possible before a reply."""

from tests.sim.directives import (
    DirectiveEdit,
    Knowledge,
    adding,
    applicable_edits,
    removing,
    removing_all,
    rewritten,
)

QUESTION = {"role": "user", "content": "look here"}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "much"}
SYSTEM = {"role": "system", "content": "look here"}


def edit_of(text, operation="one", **place):
    return DirectiveEdit(operation, "forget", text, **place)


def test_newer_directive_for_a_whole_message_wins():
    state = (edit_of("a", result_of="call-1"), edit_of("b", target=("tool", "much")))
    assert rewritten([RESULT], state) == [{**RESULT, "content": "b"}]
    assert rewritten([RESULT], state[::-1]) == [{**RESULT, "content": "a"}]
    assert applicable_edits([RESULT], state) == [state[1]]


def test_tool_results_stay_and_system_prompts_are_unchanged():
    state = edit_of(None, target=("user", "look here")), edit_of("", result_of="call-1")
    assert rewritten([SYSTEM, QUESTION, RESULT], state) == [SYSTEM, {**RESULT, "content": ""}]


def test_character_edits_apply_to_one_of_several_equal_messages():
    name = "user", "look here"
    state = (
        edit_of("A", target=name, nth=1, span=(0, 4)),
        edit_of("", target=name, nth=1, span=(5, 9)),
    )
    assert [each["content"] for each in rewritten([QUESTION, QUESTION], state)] == [
        "look here",
        "A ",
    ]


def test_unanswered_change_remains_possible():
    known, edit = Knowledge(), edit_of("a", result_of="call-1")
    known.outstanding["add", "one"] = adding([edit])
    known.spread(adding([edit]))
    assert known.possible == [(), (edit,)]
    known.narrow([()], ("node-a", 1.0))
    assert known.possible == [(), (edit,)]
    known.settle(adding([edit]))
    assert known.possible == [(edit,)]


def test_undo_is_certain_once_answered():
    known, edit = Knowledge(), edit_of("a", result_of="call-1")
    known.settle(adding([edit]))
    known.spread(removing({"one"}))
    assert known.possible == [(edit,), ()]
    known.settle(removing({"one"}))
    assert known.possible == [()]
    known.settle(adding([edit]))
    known.settle(removing_all)
    assert known.possible == [()]


def test_late_reply_may_list_the_state_before_a_later_change():
    known = Knowledge()
    first, second = edit_of("a", result_of="call-1"), edit_of("b", "two", result_of="call-2")
    known.spread(adding([first]))
    with known.states_during_call() as states:
        known.spread(adding([second]))
        known.settle(adding([second]))
    known.settle(adding([first]))
    assert (first,) not in known.possible
    listable = set(map(adding([first]), states))
    assert listable == {(first,), (first, second), (second, first)}
    known.settle(removing_all)
    assert set(map(adding([first]), states)) == listable
