"""The effect of each policy on a conversation."""

from dataclasses import replace

import pytest

from fabric.errors import RejectedError
from router.policies.drop_failed_tool_calls import DropFailedToolCalls, is_failure_text
from router.policies.exchanges import Exchange, exchanges_of, unpaired
from router.policies.registry import KeepAll, create_built_in
from router.policies.strip_thinking import StripThinking
from router.policies.summarize_to_stub import SummarizeToStub
from router.policies.truncate_older_than import TruncateOlderThan
from router.policies.truncation import oldest_first, without_oldest
from tests.router.policies.strategies import TURN, answer, call, result, system, user

LONG = "first " + "x" * 5_000 + " last"


def loop(count, text=LONG, name="bash"):
    """One message of the user, and so many answers that call a tool."""
    said = [system("be brief"), user("go")]
    for n in range(count):
        said += [answer("", call(f"c{n}", name, n=n)), result(f"c{n}", text)]
    return said


def texts(messages):
    return ["".join(message.texts) for message in messages]


def test_keep_all_keeps_all():
    said = loop(3)
    assert KeepAll().transform(said, TURN) is said


def test_old_results_are_cut_to_their_beginning_and_end():
    said = loop(5)
    edited = TruncateOlderThan(n=2, max_chars=150).transform(said, TURN)

    assert [len(text) for text in texts(edited)[3::2]] == [150, 150, 150, len(LONG), len(LONG)]
    assert texts(edited)[3].startswith("first xx")
    assert texts(edited)[3].endswith("xx last")
    assert f"{len(LONG):,} characters" in texts(edited)[3]
    assert [a for a, b in zip(edited, said, strict=True) if a is b] == [
        *said[:3],
        *said[4:5],
        *said[6:7],
        *said[8:],
    ]


def test_only_results_of_the_tools_named_are_cut():
    said = [*loop(2, name="read")[:4], *loop(3)[2:]]
    edited = TruncateOlderThan(n=1, max_chars=100, tools=("bash",)).transform(said, TURN)

    assert [len(text) < 200 for text in texts(edited)[3::2]] == [False, True, True, False]


def test_a_stride_leaves_most_turns_begin_alike():
    policy = TruncateOlderThan(n=2, max_chars=100, every=4)
    cut = [
        sum(len(text) == 100 for text in texts(policy.transform(loop(count), TURN)))
        for count in range(12)
    ]
    assert cut == [0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_failed_calls_go_once_their_tool_went_well():
    said = [
        user("go"),
        answer("let me look", call("a", "read"), thought="perhaps here"),
        result("a", "Error: no such file"),
        answer("", call("b", "bash"), call("c", "read")),
        result("b", "all well", failed=True),
        result("c", "text"),
        answer("", call("d", "bash")),
        result("d", "done"),
    ]
    edited = DropFailedToolCalls().transform(said, TURN)

    assert edited == [
        said[0],
        answer("let me look", call("c", "read")),
        said[5],
        *said[6:],
    ]


def test_what_failed_last_stays():
    said = [
        user("go"),
        answer("", call("a")),
        result("a"),
        answer("", call("b")),
        result("b", "Error: x"),
    ]
    assert DropFailedToolCalls().transform(said, TURN) == said
    other = [*said[:2], result("a", "Error: x"), answer("", call("b", "read")), result("b")]
    assert DropFailedToolCalls().transform(other, TURN) == other, "another tool made nothing good"


def test_the_last_message_stays_in_whatever_order_results_come():
    both = answer("", call("a"), call("b"))
    said = [user("go"), both, result("b"), result("a", "Error: x")]
    assert DropFailedToolCalls().transform(said, TURN) == said


def test_what_was_said_beside_a_failed_call_stays_with_the_next_answer():
    failed = [user("go"), answer("I try.", call("a")), result("a", "Error: x")]
    well = [answer(" Again.", call("b")), result("b")]
    joined = replace(answer("", call("b")), texts=("I try.", " Again."))

    assert DropFailedToolCalls().transform([*failed, *well], TURN) == [failed[0], joined, well[1]]
    between = [*failed, user("so?"), *well]
    assert DropFailedToolCalls().transform(between, TURN) == [
        failed[0],
        answer("I try."),
        *between[3:],
    ]


def test_the_thought_goes_with_a_call_that_was_all_there_was():
    said = [
        user("go"),
        answer("", call("a"), thought="try"),
        result("a", "Traceback (most recent call last):\n  File"),
        answer("", call("b"), thought="again"),
        result("b"),
    ]
    assert DropFailedToolCalls().transform(said, TURN) == [said[0], *said[3:]]


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("Error: no such file", True),
        ("ValueError: x", True),
        ("json.decoder.JSONDecodeError: x", True),
        ("An error occurred while running the tool. Please try again.", True),
        ("Error executing tool read: x", True),
        ("error[E0308]: mismatched types", True),
        ("fatal: not a git repository", True),
        ("FAILED", True),
        ("<tool_use_error>File has not been read</tool_use_error>", True),
        ('{"error": "no"}', True),
        ('{"isError": true, "content": []}', True),
        ("Traceback (most recent call last):\n", True),
        ("", False),
        ("Errors: 0", False),
        ("Error handling in Go is explicit.", False),
        ("no error: all is well", False),
        ('{"error": null, "rows": []}', False),
        ('{"errors": []}', False),
        ("def f():\n    raise ValueError", False),
        ("The Exception class", False),
    ],
)
def test_failures_are_known_by_how_they_begin(text, failed):
    assert is_failure_text(text) is failed


def test_thoughts_of_earlier_turns_go():
    said = [
        user("one"),
        answer("1", thought="a"),
        user("two"),
        answer("2", thought="b"),
        user("three"),
        answer("", call("c"), thought="c"),
        result("c"),
    ]
    thoughts = {
        keep: [m.reasoning for m in StripThinking(keep).transform(said, TURN)] for keep in (0, 1, 9)
    }
    assert thoughts == {
        0: [None, None, None, None, None, "c", None],
        1: [None, None, None, "b", None, "c", None],
        9: [None, "a", None, "b", None, "c", None],
    }
    stripped = [m.is_stripped for m in StripThinking().transform(said, TURN)]
    assert stripped == [False, True, False, True, False, False, False], "none is put back either"


def test_old_turns_become_a_stub_in_front_of_those_that_stay():
    said = [system("be brief")]
    for n in range(4):
        said += [user(f"question {n}"), answer("x" * 10), system(f"rule {n}")]
    said += [user("last")]
    edited = SummarizeToStub(turns=2, every=1).transform(said, TURN)

    stub = "[Dropped here: 4 earlier messages (2 of the user, 2 answers), 40 characters]\n\n"
    assert texts(edited)[:4] == ["be brief", "rule 0", "rule 1", stub + "question 2"]
    assert list(edited[4:]) == said[8:]


def test_old_steps_of_a_long_turn_become_one_call_with_a_stub():
    said = loop(5, "y" * 100)
    edited = SummarizeToStub(steps=2, every=1).transform(said, TURN)

    stub = "[Dropped here: 6 earlier messages (3 answers, 3 results of tools), 324 characters]"
    assert edited == [*said[:2], said[2], result("c0", stub), *said[8:]]


def test_long_arguments_do_not_stand_for_what_was_dropped():
    said = loop(3)
    said[2] = answer("", call("c0", "write", text="x" * 900))
    edited = SummarizeToStub(steps=1, every=1).transform(said, TURN)
    assert edited[2] == answer("", call("c0", "write"))


def test_results_are_paired_by_id_and_where_there_is_none_by_place():
    said = [
        user("go"),
        answer("", call("a"), call("b")),
        result("b"),
        user("wait"),
        result("a"),
        answer("", call(None), call(None)),
        result(None),
        result("made-up"),
        answer("", call("a"), call("lost")),
        result("a"),
        answer("", call("a")),
    ]
    assert exchanges_of(said) == [
        Exchange(1, 0, 4),
        Exchange(1, 1, 2),
        Exchange(5, 0, 6),
        Exchange(5, 1, 7),
        Exchange(8, 0, 9),
        Exchange(8, 1, None),
        Exchange(10, 0, None),
    ]
    assert unpaired(said) == {("call", "lost"): 1, ("call", "a"): 1}


def test_whole_turns_go_first_then_steps_behind_the_last_message_of_the_user():
    said = [system("s"), answer("hi"), user("1"), answer("a"), user("2"), *loop(3)[1:]]
    units = oldest_first(said)

    assert units == [range(1, 4), range(4, 5), range(6, 8), range(8, 10)]
    assert without_oldest(said, units) == (said[0], said[5], *said[10:])


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("truncate_older_than", {"n": 0}, "n must be 1 to 10000"),
        ("truncate_older_than", {"max_chars": 99}, "max_chars must be at least 100"),
        ("truncate_older_than", {"chars": 1}, "unknown field 'chars'"),
        ("truncate_older_than", {"n": "2"}, "expected int"),
        ("truncate_older_than", {"tools": "bash"}, "expected a list"),
        ("summarize_to_stub", {"every": 0}, "every must be"),
        ("strip_thinking", {"keep": -1}, "keep must be"),
        ("keep_all", {"n": 1}, "unknown field 'n'"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(name, options, why):
    with pytest.raises(RejectedError, match=why) as told:
        create_built_in(name, options, "here.options")
    assert told.value.message.startswith("here.options")
