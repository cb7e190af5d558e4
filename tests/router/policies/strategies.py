"""Conversations as clients send them: tools in loops, thoughts, failures, missing or equal ids."""

from hypothesis import strategies as st

from fabric.turn.messages import Message, MessageRole, ToolUse
from router.policies.policy import PolicyTurn

TURN = PolicyTurn(3, "echo")
NAMES = st.sampled_from(["bash", "read", "look"])
TEXTS = st.sampled_from(["", "ok", "Error: no such file", "word " * 60, "ß→𝄞" * 80, "{}"])
THOUGHTS = st.sampled_from([None, None, "hm", "let me see"])


def system(text):
    return Message(MessageRole.SYSTEM, (text,))


def user(text):
    return Message(MessageRole.USER, (text,))


def answer(text="", *uses, thought=None):
    return Message(MessageRole.ASSISTANT, (text,) if text else (), reasoning=thought, uses=uses)


def call(call_id, name="bash", **arguments):
    return ToolUse(name, arguments, call_id)


def result(call_id, text="ok", *, failed=False):
    return Message(MessageRole.TOOL, (text,), result_of=call_id, is_error=failed)


@st.composite
def steps(draw, number):
    """Draw an answer, its calls and their results; some are missing, some have no call."""
    names = draw(st.lists(NAMES, max_size=3))
    style = draw(st.sampled_from(["own", "alike", "none"]))
    ids = [{"own": f"c{number}-{i}", "alike": f"c{i}", "none": None}[style] for i in range(9)]
    uses = tuple(ToolUse(name, {"n": i}, ids[i]) for i, name in enumerate(names))
    assistant = answer(draw(TEXTS), *uses, thought=draw(THOUGHTS))
    order = draw(st.permutations(range(len(uses)))) if style == "own" else range(len(uses))
    results = [result(ids[i], draw(TEXTS), failed=draw(st.booleans())) for i in order]
    if results and draw(st.integers(0, 9)) == 0:
        results.pop()
    if draw(st.integers(0, 9)) == 0:
        results.append(result("of-nobody", draw(TEXTS)))
    return [assistant, *results]


@st.composite
def conversations(draw):
    """Draw a conversation of a few turns."""
    messages = [system("be brief")] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 5))):
        messages.append(user(f"question {turn}"))
        for step in range(draw(st.integers(0, 6))):
            messages += draw(steps(10 * turn + step))
        if draw(st.integers(0, 5)) == 0:
            messages.append(system("from now on in French"))
    if draw(st.booleans()):
        messages.append(user("and now?"))
    return messages
