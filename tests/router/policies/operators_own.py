"""Policies as an operator might write them, good and bad."""

import threading
from dataclasses import replace

from fabric.turn.messages import Message, MessageRole
from router.policies.policy import EditPolicy

RELEASED = threading.Event()


class Odd(Message):
    pass


class Shouting(EditPolicy):
    def __init__(self, mark="!", only=None):
        self.mark = mark
        self.only = only

    def transform(self, messages, turn):
        if self.only is not None and turn.model != self.only:
            return messages
        last = max(at for at, m in enumerate(messages) if m.role is MessageRole.USER)
        return [
            replace(m, texts=("".join(m.texts).upper() + self.mark,))
            if m.role is MessageRole.USER and at < last and not m.texts[0].endswith(self.mark)
            else m
            for at, m in enumerate(messages)
        ]


class Failing(EditPolicy):
    def transform(self, messages, turn):
        for message in messages:
            for use in message.uses:
                use.arguments["written"] = True
        raise KeyError("".join(messages[0].texts))


class Grumbling(EditPolicy):
    def transform(self, messages, turn):
        raise type("ß\r\n" * 90, (Exception,), {})


class Exiting(EditPolicy):
    def transform(self, messages, turn):
        raise SystemExit(1)


class Slow(EditPolicy):
    def transform(self, messages, turn):
        RELEASED.wait(30)
        return messages


class Returning(EditPolicy):
    """Policy that returns the result named by its option."""

    def __init__(self, what):
        self.what = what

    def transform(self, messages, turn):
        return {
            "nothing": lambda: None,
            "no messages": list,
            "texts": lambda: ["hello"],
            "no system": lambda: [m for m in messages if m.role is not MessageRole.SYSTEM],
            "another question": lambda: [*messages[:-1], replace(messages[-1], texts=("x",))],
            "an orphan": lambda: [m for m in messages if not m.uses],
            "no result": lambda: [m for m in messages if m.role is not MessageRole.TOOL],
            "a wrong type": lambda: [*messages[:-1], Message("user", 7), messages[-1]],
            "a subclass": lambda: [*messages[:-1], Odd(MessageRole.USER, ("x",)), messages[-1]],
            "half a pair": lambda: [
                *messages[:-1],
                Message(MessageRole.USER, ("\ud800",)),
                messages[-1],
            ],
            "too much": lambda: [
                *messages[:-1],
                Message(MessageRole.USER, ("x" * (40 << 20),)),
                messages[-1],
            ],
        }[self.what]()


class Loose(EditPolicy):
    """Policy that returns equivalent parts of other types."""

    def transform(self, messages, turn):
        first = Message("user", [messages[1].texts[0]])
        return [messages[0], first, *messages[2:]]


class Unfinished(EditPolicy):
    pass


class NoPolicy:
    pass
