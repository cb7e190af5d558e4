"""Increments of a streamed answer, and the numbers and ids of its calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from fabric.turn.generation import ToolCall
from node.dialect.call_reader import CallArguments, CallEnd, CallEvent, CallStart
from node.limits import CALL_ID_CHARS_MAX


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Increment of one call: its name and id come first, then its arguments in pieces."""

    number: int  # number among the answer's calls, from 0
    id: str
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """Visible text, reasoning and calls that one token adds."""

    text: str = ""
    reasoning: str = ""
    call_deltas: list[ToolCallDelta] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)  # ended calls, whole or broken
    stopped_by: str | None = None

    def split_calls(self) -> tuple[list[ToolCallDelta | ToolCall], list[ToolCallDelta | ToolCall]]:
        """Return the parts of calls that precede the text, and those of calls that follow it.

        The whole of an ended call comes right after its last part.
        """
        ended = {call.id: call for call in self.calls}
        new = {part.id for part in self.call_deltas if part.name}
        before: list[ToolCallDelta | ToolCall] = []
        after: list[ToolCallDelta | ToolCall] = []
        for part in self.call_deltas:
            side = after if part.id in new else before
            side.append(part)
            if part.id in ended:
                side.append(ended.pop(part.id))
        return [*before, *ended.values()], after


_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_SIZE = 9  # Mistral's templates require it, and no other model minds


def call_id(seed: str, number: int) -> str:
    """Return a call's id, which is the same on every node and every read of the answer."""
    value = int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=16).digest(), "big")
    chars = ""
    for _ in range(_ID_SIZE):
        value, digit = divmod(value, len(_ID_CHARS))
        chars += _ID_CHARS[digit]
    return chars


class CallCollector:
    """Counter of an answer's calls that also gathers the open call's arguments."""

    def __init__(self, seed: str, *, takes_one: bool = False) -> None:
        """Derive ids from `seed`; with `takes_one`, drop all calls but the first."""
        self._seed = seed
        self._takes_one = takes_one
        self._count = 0
        self._ids: set[str] = set()
        self._id = self._name = self._arguments = ""
        self._is_open = False
        self.ended_count = 0

    def collect(self, events: Iterable[CallEvent], delta: AnswerDelta) -> None:
        """Add the events to `delta`."""
        for event in events:
            if self._takes_one and self.ended_count:
                return
            if isinstance(event, CallStart):
                self._start(event, delta)
            elif isinstance(event, CallArguments):
                self._arguments += event.text
                self._add_arguments(event.text, delta)
            elif isinstance(event, CallEnd):
                self._end(ToolCall(self._name, self._arguments, self._id), delta)

    def break_off(self, delta: AnswerDelta) -> bool:
        """End a call that has begun, with the arguments so far; return whether there is one."""
        was_open = self._is_open
        if was_open:
            self._end(ToolCall(self._name, self._arguments, self._id, is_broken=True), delta)
        return was_open

    def _end(self, call: ToolCall, delta: AnswerDelta) -> None:
        self._is_open = False
        self.ended_count += 1
        delta.calls.append(call)

    def _start(self, start: CallStart, delta: AnswerDelta) -> None:
        model_id = start.id or ""
        is_usable = model_id.isprintable() and model_id not in self._ids
        if not model_id or len(model_id) > CALL_ID_CHARS_MAX or not is_usable:
            model_id = call_id(self._seed, self._count)
        self._id = model_id
        self._ids.add(self._id)
        self._name, self._arguments, self._is_open = start.name, "", True
        delta.call_deltas.append(ToolCallDelta(self._count, self._id, start.name))
        self._count += 1

    def _add_arguments(self, text: str, delta: AnswerDelta) -> None:
        """Extend the last increment if it is of the same call."""
        number = self._count - 1
        last = delta.call_deltas[-1] if delta.call_deltas else None
        if last is not None and last.number == number:
            arguments = last.arguments + text
            delta.call_deltas[-1] = ToolCallDelta(number, self._id, last.name, arguments)
        else:
            delta.call_deltas.append(ToolCallDelta(number, self._id, arguments=text))
