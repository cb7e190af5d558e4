"""Tool calls paired with their results, and positions where a conversation may be cut."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fabric.turn.messages import Message, MessageRole, ToolUse


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tool call and its result, by their messages' indexes."""

    asked_at: int
    use_at: int  # among the calls of that message
    answered_at: int | None  # None: no result

    def use(self, messages: Sequence[Message]) -> ToolUse:
        return messages[self.asked_at].uses[self.use_at]


def exchanges_of(messages: Sequence[Message]) -> list[Exchange]:
    """Return all calls in order; a result follows its call before the next answer."""
    found: list[Exchange] = []
    waiting = _Waiting()
    for at, message in enumerate(messages):
        if message.role is MessageRole.ASSISTANT:
            found += [Exchange(*place, None) for place in waiting.places]
            waiting = _Waiting()
            for use_at, use in enumerate(message.uses):
                waiting.add((at, use_at), use.id)
        elif message.role is MessageRole.TOOL:
            place = waiting.take(message.result_of)
            if place is not None:
                found.append(Exchange(*place, at))
    found += [Exchange(*place, None) for place in waiting.places]
    return sorted(found, key=lambda each: (each.asked_at, each.use_at))


Place = tuple[int, int]


class _Waiting:
    """Index of an answer's calls without a result yet: there may be thousands."""

    def __init__(self) -> None:
        self.places: dict[Place, str | None] = {}  # and their ids
        self._by_id: dict[str | None, deque[Place]] = {}

    def add(self, place: Place, call_id: str | None) -> None:
        self.places[place] = call_id
        self._by_id.setdefault(call_id, deque()).append(place)

    def take(self, result_of: str | None) -> Place | None:
        """Return a result's call by its id; if either has no id, the first open one."""
        if result_of is None and self.places:
            result_of = next(iter(self.places.values()))
        places = self._by_id.get(result_of) or self._by_id.get(None)
        if not places:
            return None
        place = places.popleft()
        del self.places[place]
        return place


def unpaired(messages: Sequence[Message]) -> Counter[tuple[str, str | None]]:
    """Return the number of calls without a result and of results without a call, by id."""
    exchanges = exchanges_of(messages)
    answers = {each.answered_at for each in exchanges}
    alone: Counter[tuple[str, str | None]] = Counter(
        ("call", each.use(messages).id) for each in exchanges if each.answered_at is None
    )
    alone.update(
        ("result", message.result_of)
        for at, message in enumerate(messages)
        if message.role is MessageRole.TOOL and at not in answers
    )
    return alone


def last_of(messages: Sequence[Message], role: MessageRole) -> int:
    """Return the index of the last message of a role, or -1."""
    return next((at for at in reversed(range(len(messages))) if messages[at].role is role), -1)


def user_turns(messages: Sequence[Message]) -> list[int]:
    """Return the indexes of the user messages, each of which begins a turn."""
    return [at for at, message in enumerate(messages) if message.role is MessageRole.USER]


def tool_turns(messages: Sequence[Message], start: int = 0) -> Iterator[int]:
    """Yield the indexes of answers with tool calls, from `start` on."""
    for at in range(start, len(messages)):
        if messages[at].role is MessageRole.ASSISTANT and messages[at].uses:
            yield at
