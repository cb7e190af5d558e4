"""Folding of messages that a template refuses: each fold alone, the least change first."""

from node.dialect.folding import FoldedMessages, fold


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def tries(*pairs):
    return {
        each.notes: [(m["role"], m["content"]) for m in each.messages]
        for each in fold(FoldedMessages(said(*pairs), ()))
    }


LATE = "folded later system messages into the user's"
FIRST = "folded the system message into the user's"


def test_a_plain_conversation_has_nothing_to_fold():
    assert not tries(("user", "a"), ("assistant", "b"), ("user", "c"))


def test_a_later_system_message_goes_to_the_user_beside_it():
    ahead = tries(
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c")
    )
    behind = tries(("system", "s"), ("user", "a"), ("system", "t"), ("assistant", "b"))
    alone = tries(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"))

    assert ahead[LATE,] == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "t\n\nc")]
    assert behind[LATE,] == [("system", "s"), ("user", "a\n\nt"), ("assistant", "b")]
    assert alone[LATE,] == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "t")]


def test_messages_in_a_row_become_one():
    made = tries(("system", "s"), ("system", "t"), ("user", "a"), ("user", "b"))

    assert made["merged system messages",][0] == ("system", "s\n\nt")
    assert made["merged messages of the user",][-1] == ("user", "a\n\nb")
    both = made["merged system messages", "merged messages of the user"]
    assert both == [("system", "s\n\nt"), ("user", "a\n\nb")]


def test_the_first_system_message_goes_to_the_first_user():
    made = tries(("system", "s"), ("user", "a"), ("assistant", "b"))

    assert made[FIRST,] == [("user", "s\n\na"), ("assistant", "b")]


def test_parallel_calls_become_one_after_the_other():
    uses = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "xy"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "yx"]
    messages = [*said(("user", "a")), {"role": "assistant", "content": "Hm", "tool_calls": uses}]
    made = next(fold(FoldedMessages([*messages, *results], ())))

    told = [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in made.messages]
    assert told == [
        ("user", "a", 0),
        ("assistant", "Hm", 1),
        ("tool", "x", 0),
        ("assistant", "", 1),
        ("tool", "y", 0),
    ]
    assert made.notes == ("gave each tool call a message of its own",)


CALL = {"id": "x", "function": {"name": "look", "arguments": {}}}


def test_roles_alternate_where_the_user_interrupts_calls_and_where_an_answer_is_first():
    use = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "x", "tool_call_id": "x"}
    user = {"role": "user", "content": "a"}
    for called in ([use], [use, result]):
        made = next(fold(FoldedMessages([user, *called, user], ())))
        answer = {"role": "assistant", "content": "OK."}
        assert made.messages == [user, *called, answer, user]
    made = next(fold(FoldedMessages([use, result], ())))
    assert made.messages == [{"role": "user", "content": "Hello."}, use, result]


def test_what_comes_later_changes_nothing_of_what_was():
    """Otherwise each turn would be computed anew."""
    early = (("system", "s"), ("user", "a"), ("system", "t"), ("user", "b"))
    before = tries(*early)[LATE,]
    after = tries(*early, ("assistant", "c"), ("system", "u"), ("user", "d"))[LATE,]

    assert after[: len(before)] == before
