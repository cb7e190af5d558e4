"""A conversation whose last message is an answer that the model is to go on with."""

from collections.abc import Sequence

from fabric.turn.call_choice import CallChoice
from fabric.turn.generation import Sampling
from fabric.turn.messages import Message, MessageRole
from router.http.fields import refuse


def is_begun(messages: Sequence[Message], param: str) -> bool:
    """Say whether the last message is one; raise RejectedError where nothing could follow it."""
    last = messages[-1]
    if last.role is not MessageRole.ASSISTANT:
        return False
    if last.uses:
        refuse(param, "its last message calls tools: their results come next")
    return bool("".join(last.texts) or last.reasoning)


def without_empty(messages: Sequence[Message], param: str) -> list[Message]:
    """Leave out a last answer that says nothing yet: the model begins it."""
    last = messages[-1]
    is_empty = not ("".join(last.texts) or last.reasoning or last.uses)
    if last.role is not MessageRole.ASSISTANT or not is_empty:
        return list(messages)
    if len(messages) == 1:
        refuse(param, "nobody says anything")
    return list(messages[:-1])


def refuse_format(sampling: Sampling, param: str, calls: CallChoice) -> None:
    """Raise RejectedError where the rest of an answer should fit a format as if it were whole."""
    if calls.must_call:
        refuse("tool_choice", "an answer that is begun is not made to call")
    if sampling.output is not None:
        refuse(param, "an answer that is begun is not made to fit a format")
