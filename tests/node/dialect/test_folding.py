"""Folding of messages that a template refuses: each fold alone, the least change first."""

from node.dialect.folding import FoldedMessages, fold


def messages_of(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def folds_of(*pairs):
    return {
        each.notes: [(m["role"], m["content"]) for m in each.messages]
        for each in fold(FoldedMessages(messages_of(*pairs), ()))
    }


LATE = "folded later system messages into the user's"
FIRST = "folded the system message into the user's"


def test_alternating_conversation_has_no_folds():
    assert not folds_of(("user", "a"), ("assistant", "b"), ("user", "c"))


def test_later_system_message_is_folded_into_the_adjacent_user():
    before_user = folds_of(
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c")
    )
    after_user = folds_of(("system", "s"), ("user", "a"), ("system", "t"), ("assistant", "b"))
    alone = folds_of(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"))

    assert before_user[LATE,] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "t\n\nc"),
    ]
    assert after_user[LATE,] == [("system", "s"), ("user", "a\n\nt"), ("assistant", "b")]
    assert alone[LATE,] == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "t")]


def test_consecutive_messages_of_a_role_are_merged():
    folds = folds_of(("system", "s"), ("system", "t"), ("user", "a"), ("user", "b"))

    assert folds["merged system messages",][0] == ("system", "s\n\nt")
    assert folds["merged messages of the user",][-1] == ("user", "a\n\nb")
    both = folds["merged system messages", "merged messages of the user"]
    assert both == [("system", "s\n\nt"), ("user", "a\n\nb")]


def test_first_system_message_is_folded_into_the_first_user():
    folds = folds_of(("system", "s"), ("user", "a"), ("assistant", "b"))

    assert folds[FIRST,] == [("user", "s\n\na"), ("assistant", "b")]


def test_parallel_calls_become_sequential():
    uses = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "xy"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "yx"]
    messages = [
        *messages_of(("user", "a")),
        {"role": "assistant", "content": "Hm", "tool_calls": uses},
    ]
    folded = next(fold(FoldedMessages([*messages, *results], ())))

    summary = [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in folded.messages]
    assert summary == [
        ("user", "a", 0),
        ("assistant", "Hm", 1),
        ("tool", "x", 0),
        ("assistant", "", 1),
        ("tool", "y", 0),
    ]
    assert folded.notes == ("gave each tool call a message of its own",)


CALL = {"id": "x", "function": {"name": "look", "arguments": {}}}


def test_roles_alternate_after_interrupted_calls_and_leading_answers():
    use = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "x", "tool_call_id": "x"}
    user = {"role": "user", "content": "a"}
    for called in ([use], [use, result]):
        folded = next(fold(FoldedMessages([user, *called, user], ())))
        answer = {"role": "assistant", "content": "OK."}
        assert folded.messages == [user, *called, answer, user]
    folded = next(fold(FoldedMessages([use, result], ())))
    assert folded.messages == [{"role": "user", "content": "Hello."}, use, result]


def test_later_messages_do_not_change_earlier_folds():
    """Otherwise the whole prompt of each turn would be computed again."""
    early = (("system", "s"), ("user", "a"), ("system", "t"), ("user", "b"))
    before = folds_of(*early)[LATE,]
    after = folds_of(*early, ("assistant", "c"), ("system", "u"), ("user", "d"))[LATE,]

    assert after[: len(before)] == before
