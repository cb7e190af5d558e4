"""Put back what a client left out of an earlier answer: the thought that came before it.

Most programs send an answer's text and calls, and drop its reasoning. Where a template repeats the
thoughts since the last question, the prompt then differs from what was computed, and from what the
model was trained on. An answer is known by its place: by all messages up to it, white space, ids
and the spelling of arguments apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xxhash import xxh3_64

from fabric.limits import THOUGHTS_BYTES_MAX
from fabric.template_options import RESTORE_OPTION
from fabric.turn.generation import GenerateRequest, ToolCall
from fabric.turn.messages import Message, MessageRole, ToolUse
from node.dialect.shown import Shown

NO_THOUGHTS: Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class PutBack:
    """A request with what was left out of it."""

    request: GenerateRequest
    note: str = ""  # in words that follow a match's reason


@dataclass(slots=True, eq=False)
class ShownAnswer:
    """What a client is shown of one answer."""

    _thoughts: list[str] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)

    def add(self, shown: Shown) -> None:
        self._thoughts.append(shown.reasoning)
        self._texts.append(shown.text)
        self._calls += shown.calls

    def remembered(
        self, request: GenerateRequest, thoughts: Mapping[int, str]
    ) -> Mapping[int, str]:
        """Return the agent's thoughts with this answer's; of half an answer nothing is known."""
        thought = "".join(self._thoughts)
        if not request.messages or request.resume is not None or not (thought or thoughts):
            return thoughts
        uses = tuple(ToolUse(call.name, call.arguments) for call in self._calls)
        said = ("".join(self._texts),)
        answer = Message(MessageRole.ASSISTANT, said, reasoning=thought or None, uses=uses)
        return remember(thoughts, request.messages, answer)


def put_back(request: GenerateRequest, thoughts: Mapping[int, str]) -> PutBack:
    """Return the request with the known thoughts that its answers came without."""
    options = dict(request.template_options)
    is_wanted = options.pop(RESTORE_OPTION, True) is not False
    request = replace(request, template_options=options)
    messages = request.messages
    if not thoughts or not messages or not is_wanted:
        return PutBack(request)
    whole = [
        replace(message, reasoning=thoughts[place])
        if message.role is MessageRole.ASSISTANT and not message.reasoning and place in thoughts
        else message
        for message, place in zip(messages, _places(messages), strict=True)
    ]
    count = sum(a is not b for a, b in zip(messages, whole, strict=True))
    if not count:
        return PutBack(request)
    return PutBack(replace(request, messages=tuple(whole)), f"; restored reasoning: {count}")


def remember(
    thoughts: Mapping[int, str], messages: Sequence[Message], answer: Message
) -> dict[int, str]:
    """Return the thoughts of this conversation and its new answer; the oldest go first."""
    known: dict[int, str] = {}
    left_bytes = THOUGHTS_BYTES_MAX
    places = list(_places([*messages, answer]))
    said = [*(message.reasoning for message in messages), answer.reasoning]
    for place, reasoning in zip(reversed(places), reversed(said), strict=True):
        thought = reasoning or thoughts.get(place)
        if thought:
            left_bytes -= len(thought.encode("utf-8", "replace"))
            if left_bytes < 0:
                break
            known[place] = thought
    return known


def _places(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the chained hash of all messages up to each."""
    digest = xxh3_64(seed=2)
    for message in messages:
        uses = [(use.name, _spelled(use)) for use in message.uses]
        said = [message.role.value, "".join(message.texts).strip(), message.name, uses]
        digest.update(json.dumps(said).encode() + b"\n")
        yield digest.intdigest()


def _spelled(use: ToolUse) -> str:
    try:
        arguments = json.loads(use.arguments) if isinstance(use.arguments, str) else use.arguments
    except ValueError:
        arguments = use.arguments
    return json.dumps(arguments, sort_keys=True)
