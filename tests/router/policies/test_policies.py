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
    """Return a user's message, and `count` answers with a tool call each."""
    messages = [system("be brief"), user("go")]
    for n in range(count):
        messages += [answer("", call(f"c{n}", name, n=n)), result(f"c{n}", text)]
    return messages


def texts(messages):
    return ["".join(message.texts) for message in messages]


def test_keep_all_returns_messages_unchanged():
    messages = loop(3)
    assert KeepAll().transform(messages, TURN) is messages


def test_truncate_older_than_cuts_middle_of_old_results():
    messages = loop(5)
    edited = TruncateOlderThan(n=2, max_chars=150).transform(messages, TURN)

    assert [len(text) for text in texts(edited)[3::2]] == [150, 150, 150, len(LONG), len(LONG)]
    assert texts(edited)[3].startswith("first xx")
    assert texts(edited)[3].endswith("xx last")
    assert f"{len(LONG):,} characters" in texts(edited)[3]
    assert [a for a, b in zip(edited, messages, strict=True) if a is b] == [
        *messages[:3],
        *messages[4:5],
        *messages[6:7],
        *messages[8:],
    ]


def test_only_results_of_named_tools_are_truncated():
    messages = [*loop(2, name="read")[:4], *loop(3)[2:]]
    edited = TruncateOlderThan(n=1, max_chars=100, tools=("bash",)).transform(messages, TURN)

    assert [len(text) < 200 for text in texts(edited)[3::2]] == [False, True, True, False]


def test_truncation_stride_keeps_prefixes_stable():
    policy = TruncateOlderThan(n=2, max_chars=100, every=4)
    cut = [
        sum(len(text) == 100 for text in texts(policy.transform(loop(count), TURN)))
        for count in range(12)
    ]
    assert cut == [0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_failed_calls_are_dropped_after_their_tool_succeeds():
    messages = [
        user("go"),
        answer("let me look", call("a", "read"), thought="perhaps here"),
        result("a", "Error: no such file"),
        answer("", call("b", "bash"), call("c", "read")),
        result("b", "all well", failed=True),
        result("c", "text"),
        answer("", call("d", "bash")),
        result("d", "done"),
    ]
    edited = DropFailedToolCalls().transform(messages, TURN)

    assert edited == [
        messages[0],
        answer("let me look", call("c", "read")),
        messages[5],
        *messages[6:],
    ]


def test_last_failed_call_is_kept():
    messages = [
        user("go"),
        answer("", call("a")),
        result("a"),
        answer("", call("b")),
        result("b", "Error: x"),
    ]
    assert DropFailedToolCalls().transform(messages, TURN) == messages
    other = [*messages[:2], result("a", "Error: x"), answer("", call("b", "read")), result("b")]
    assert DropFailedToolCalls().transform(other, TURN) == other, "another tool succeeded"


def test_last_message_is_kept_for_any_order_of_results():
    both = answer("", call("a"), call("b"))
    messages = [user("go"), both, result("b"), result("a", "Error: x")]
    assert DropFailedToolCalls().transform(messages, TURN) == messages


def test_text_beside_failed_call_moves_to_next_answer():
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


def test_thought_is_dropped_with_its_only_call():
    messages = [
        user("go"),
        answer("", call("a"), thought="try"),
        result("a", "Traceback (most recent call last):\n  File"),
        answer("", call("b"), thought="again"),
        result("b"),
    ]
    assert DropFailedToolCalls().transform(messages, TURN) == [messages[0], *messages[3:]]


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
def test_failures_are_recognized_by_their_first_words(text, failed):
    assert is_failure_text(text) is failed


def test_strip_thinking_drops_thoughts_of_earlier_turns():
    messages = [
        user("one"),
        answer("1", thought="a"),
        user("two"),
        answer("2", thought="b"),
        user("three"),
        answer("", call("c"), thought="c"),
        result("c"),
    ]
    thoughts = {
        keep: [m.reasoning for m in StripThinking(keep).transform(messages, TURN)]
        for keep in (0, 1, 9)
    }
    assert thoughts == {
        0: [None, None, None, None, None, "c", None],
        1: [None, None, None, "b", None, "c", None],
        9: [None, "a", None, "b", None, "c", None],
    }
    stripped = [m.is_stripped for m in StripThinking().transform(messages, TURN)]
    assert stripped == [False, True, False, True, False, False, False], "none is restored either"


def test_old_turns_become_a_stub_before_kept_turns():
    messages = [system("be brief")]
    for n in range(4):
        messages += [user(f"question {n}"), answer("x" * 10), system(f"rule {n}")]
    messages += [user("last")]
    edited = SummarizeToStub(turns=2, every=1).transform(messages, TURN)

    stub = "[Dropped here: 4 earlier messages (2 user messages, 2 answers), 40 characters]\n\n"
    assert texts(edited)[:4] == ["be brief", "rule 0", "rule 1", stub + "question 2"]
    assert list(edited[4:]) == messages[8:]


def test_old_steps_of_long_turn_become_one_call_with_a_stub():
    messages = loop(5, "y" * 100)
    edited = SummarizeToStub(steps=2, every=1).transform(messages, TURN)

    stub = "[Dropped here: 6 earlier messages (3 answers, 3 tool results), 324 characters]"
    assert edited == [*messages[:2], messages[2], result("c0", stub), *messages[8:]]


def test_stub_call_omits_long_arguments():
    messages = loop(3)
    messages[2] = answer("", call("c0", "write", text="x" * 900))
    edited = SummarizeToStub(steps=1, every=1).transform(messages, TURN)
    assert edited[2] == answer("", call("c0", "write"))


def test_results_are_paired_by_id_else_by_position():
    messages = [
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
    assert exchanges_of(messages) == [
        Exchange(1, 0, 4),
        Exchange(1, 1, 2),
        Exchange(5, 0, 6),
        Exchange(5, 1, 7),
        Exchange(8, 0, 9),
        Exchange(8, 1, None),
        Exchange(10, 0, None),
    ]
    assert unpaired(messages) == {("call", "lost"): 1, ("call", "a"): 1}


def test_whole_turns_are_dropped_before_steps_of_last_turn():
    messages = [system("s"), answer("hi"), user("1"), answer("a"), user("2"), *loop(3)[1:]]
    units = oldest_first(messages)

    assert units == [range(1, 4), range(4, 5), range(6, 8), range(8, 10)]
    assert without_oldest(messages, units) == (messages[0], messages[5], *messages[10:])


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
def test_invalid_options_are_rejected_with_reason(name, options, why):
    with pytest.raises(RejectedError, match=why) as caught:
        create_built_in(name, options, "here.options")
    assert caught.value.message.startswith("here.options")
