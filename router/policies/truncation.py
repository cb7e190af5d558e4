"""Truncation of prompts longer than the model's context, from their oldest part on.

Whole turns of a conversation are dropped, or the beginning of a text or of token ids. The dropped
part grows in steps of an eighth of the context, so that successive turns share a cached prefix.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Final

from fabric.errors import RejectedError
from fabric.turn.messages import Message, MessageRole
from fabric.turn.sketch import canonical_chunks
from router.limits import TRUNCATION_COUNTS_MAX
from router.policies.exchanges import last_of, user_turns
from router.policies.policy import CountedEdit, EditOutcome, PromptServices, can_reach_tokens
from router.prompt import BYTES_PER_TOKEN, Prompt, raw_prompt, tokens_prompt


def oldest_first(messages: Sequence[Message]) -> list[range]:
    """Return the droppable units, the oldest first, as ranges of message indexes.

    These are the user's turns except the last, then the last turn's answers with their results
    except the last. System messages in between are kept.
    """
    starts = user_turns(messages)
    first = next((at for at, m in enumerate(messages) if m.role is not MessageRole.SYSTEM), 0)
    begins = [first, *starts[1:]] if starts else []
    turns = [range(a, b) for a, b in pairwise(begins)]
    present = last_of(messages, MessageRole.USER)
    answers = [
        at for at in range(present + 1, len(messages)) if messages[at].role is MessageRole.ASSISTANT
    ]
    return turns + [range(a, b) for a, b in pairwise(answers)]


def without_oldest(messages: Sequence[Message], units: Sequence[range]) -> tuple[Message, ...]:
    """Return the messages without some units, except their system messages."""
    dropped = {at for unit in units for at in unit}
    return tuple(
        message
        for at, message in enumerate(messages)
        if at not in dropped or message.role is MessageRole.SYSTEM
    )


TRUNCATION: Final = "truncation"  # its name in reports
_ANSWER_SHARE: Final = 4  # up to a quarter of the context is left for the answer
_STRIDE_SHARE: Final = 8
_LINE_SHARE: Final = 4  # of a stride: the range searched for the start of a line
_TOO_LONG: Final = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Truncation(CountedEdit):
    """Edit that drops whole turns, and answers with their results after the last user message.

    It drops the beginning of a raw prompt; the outcome then counts characters or token ids.
    """

    answer_tokens: int  # the client's maximum
    name: str = TRUNCATION

    async def apply(self, prompt: Prompt, services: PromptServices) -> tuple[Prompt, EditOutcome]:
        """Return a prompt that fits; unchanged if it fits already, or if no cut suffices."""
        nothing = prompt, EditOutcome(self.name)
        context = services.context_tokens_max
        if context is None or not can_reach_tokens(prompt, context):
            return nothing
        total = await _count(prompt, services)
        if total < context:
            return nothing
        limit = context - min(self.answer_tokens, context // _ANSWER_SHARE)
        cuts = await services.run(prompt, partial(_cuts_of, prompt, context))
        fitting = await _longest(cuts, total, limit, services)
        if fitting is None:
            return nothing
        edited, tokens = fitting
        dropped = _length(prompt) - _length(edited)
        return edited, EditOutcome(self.name, dropped, max(0, total - tokens))


def _length(prompt: Prompt) -> int:
    """Return the number of messages, characters or token ids of a prompt."""
    return len(prompt.messages or prompt.text or prompt.ids or ())


async def _longest(
    cuts: "_Cuts", total: int, limit: int, services: PromptServices
) -> tuple[Prompt, int] | None:
    """Search for the smallest sufficient cut, starting from an estimate; also count its tokens."""
    best: tuple[Prompt, int] | None = None
    low, high = 0, len(cuts.dropped)  # cuts in between are untried
    at = cuts.after(0, total - limit, cuts.prompt, total)
    for _ in range(TRUNCATION_COUNTS_MAX):
        if low >= high:
            break
        at = min(max(at, low), high - 1)
        tried = await services.run(cuts.prompt, partial(cuts.prompt_after, at))
        count = await _count(tried, services)
        if count <= limit:
            best, high, at = (tried, count), at, at - 1
        else:
            low = at + 1
            at = low if best else cuts.after(cuts.dropped[at][1], count - limit, tried, count)
    return best


@dataclass(frozen=True, slots=True)
class _Cuts(ABC):
    """Positions at which a prompt may be cut."""

    prompt: Prompt = field(repr=False)
    dropped: list[tuple[int, int]]  # by cut: number of units and their bytes

    def after(self, dropped_bytes: int, over_tokens: int, prompt: Prompt, tokens: int) -> int:
        """Estimate the first cut that drops `over_tokens` more tokens."""
        more = over_tokens * prompt.bytes_count // tokens
        return bisect_left(self.dropped, dropped_bytes + more, key=lambda each: each[1])

    @abstractmethod
    def prompt_after(self, at: int) -> Prompt:
        """Return the prompt after cut number `at`."""


def _cuts_of(prompt: Prompt, context_tokens: int) -> _Cuts:
    if prompt.messages is not None:
        return _TurnCuts.of(prompt, prompt.messages, context_tokens)
    return _RawCuts.of(prompt, context_tokens)


@dataclass(frozen=True, slots=True)
class _TurnCuts(_Cuts):
    """Cuts between the droppable units of a conversation."""

    units: list[range]

    @classmethod
    def of(cls, prompt: Prompt, messages: Sequence[Message], context_tokens: int) -> "_TurnCuts":
        stride = max(1, round(context_tokens * BYTES_PER_TOKEN) // _STRIDE_SHARE)
        units, dropped, size_bytes = oldest_first(messages), [], 0
        for count, unit in enumerate(units, 1):
            before, size_bytes = size_bytes, size_bytes + _bytes_of(messages, unit)
            if size_bytes // stride > before // stride or count == len(units):
                dropped.append((count, size_bytes))
        return cls(prompt, dropped, units)

    def prompt_after(self, at: int) -> Prompt:
        dropped_units = self.units[: self.dropped[at][0]]
        return self.prompt.with_messages(without_oldest(self.prompt.messages or (), dropped_units))


@dataclass(frozen=True, slots=True)
class _RawCuts(_Cuts):
    """Cuts of a text, at the start of a line if one is near, or of token ids."""

    @classmethod
    def of(cls, prompt: Prompt, context_tokens: int) -> "_RawCuts":
        text, dropped, size_bytes = prompt.text, [], 0
        if text is None:
            stride = max(1, context_tokens // _STRIDE_SHARE)
            ends = range(stride, len(prompt.ids or ()), stride)
            return cls(prompt, [(end, round(end * BYTES_PER_TOKEN)) for end in ends])
        stride = max(1, round(context_tokens * BYTES_PER_TOKEN) // _STRIDE_SHARE)
        start = 0
        for place in range(stride, len(text), stride):
            end = text.find("\n", place, place + stride // _LINE_SHARE) + 1 or place
            size_bytes += len(text[start:end].encode("utf-8", "surrogatepass"))
            dropped.append((end, size_bytes))
            start = end
        return cls(prompt, dropped)

    def prompt_after(self, at: int) -> Prompt:
        start, text = self.dropped[at][0], self.prompt.text
        prompt = (
            raw_prompt(text[start:]) if text else tokens_prompt((self.prompt.ids or ())[start:])
        )
        return replace(prompt, echo=self.prompt.echo)


def _bytes_of(messages: Sequence[Message], unit: range) -> int:
    return sum(map(len, canonical_chunks(messages[unit.start : unit.stop], None)))


async def _count(prompt: Prompt, services: PromptServices) -> int:
    """Count a prompt's tokens; if it is too long to count, return its bytes, an upper bound."""
    try:
        return await services.count(prompt)
    except RejectedError as error:
        if error.code != _TOO_LONG:
            raise
        return max(1, prompt.bytes_count)
