"""An answer's calls, numbered and named: from parts that are read to what clients are sent."""

from collections.abc import Iterable
from hashlib import blake2b

from fabric.turn.generation import ToolCall
from node.dialect.call_body import Begun, Closed, Part, Written
from node.dialect.shown import CallPart, Shown
from node.limits import CALL_ID_CHARS_MAX

_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_SIZE = 9  # what Mistral's templates insist on, and no other minds


def call_id(seed: str, number: int) -> str:
    """Name a call: the same wherever and however often the answer is read."""
    value = int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=16).digest(), "big")
    made = ""
    for _ in range(_ID_SIZE):
        value, digit = divmod(value, len(_ID_CHARS))
        made += _ID_CHARS[digit]
    return made


class CallLog:
    """Counts calls; the open one's name and arguments are gathered."""

    def __init__(self, seed: str, *, takes_one: bool = False) -> None:
        """Show all, or with `takes_one` the first alone."""
        self._seed = seed
        self._takes_one = takes_one
        self._count = 0
        self._ids: set[str] = set()
        self._id = self._name = self._arguments = ""
        self.ended_count = 0

    def show(self, parts: Iterable[Part], shown: Shown) -> None:
        for part in parts:
            if self._takes_one and self.ended_count:
                return
            if isinstance(part, Begun):
                self._begin(part, shown)
            elif isinstance(part, Written):
                self._arguments += part.text
                self._add(part.text, shown)
            elif isinstance(part, Closed):
                self.ended_count += 1
                shown.calls.append(ToolCall(self._name, self._arguments, self._id))

    def _begin(self, begun: Begun, shown: Shown) -> None:
        own = begun.id if begun.id and len(begun.id) <= CALL_ID_CHARS_MAX else None
        is_good = own and own.isprintable() and own not in self._ids
        self._id = own if own and is_good else call_id(self._seed, self._count)
        self._ids.add(self._id)
        self._name, self._arguments = begun.name, ""
        shown.parts.append(CallPart(self._count, self._id, begun.name))
        self._count += 1

    def _add(self, text: str, shown: Shown) -> None:
        """Join what one token adds to one call."""
        number = self._count - 1
        last = shown.parts[-1] if shown.parts else None
        if last is not None and last.number == number:
            shown.parts[-1] = CallPart(number, self._id, last.name, last.arguments + text)
        else:
            shown.parts.append(CallPart(number, self._id, arguments=text))
