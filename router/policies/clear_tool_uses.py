"""Clears what old calls of tools brought, and what they were asked with, if that is wished."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fabric.turn.messages import Message, MessageRole, ToolUse
from router.policies.counted_edit import CountedEdit, PromptDesk, may_have
from router.policies.exchanges import Exchange, exchanges_of, last_of
from router.policies.policy import EditOutcome
from router.prompt import Prompt

CLEARED: Final = "[This tool result was cleared.]"


@dataclass(frozen=True, slots=True)
class Clearing:
    """Which calls are cleared."""

    keep: int  # of the last ones, whatever their tools
    exclude: Collection[str]  # tools whose calls stay
    inputs: bool | Collection[str] = False  # whose arguments go, too

    def of(self, messages: Sequence[Message]) -> list[Exchange]:
        """List what is cleared; results that no answer has followed yet are to be read first."""
        answered = [each for each in exchanges_of(messages) if each.answered_at is not None]
        last = last_of(messages, MessageRole.ASSISTANT)
        old = answered[: max(0, len(answered) - self.keep)]
        return [
            each
            for each in old
            if each.asked_at < last
            and each.use(messages).name not in self.exclude
            and not self._is_cleared(each, messages)
        ]

    def clear(self, messages: Sequence[Message], chosen: Sequence[Exchange]) -> list[Message]:
        """Return the messages, with these calls cleared."""
        edited = list(messages)
        for each in chosen:
            assert each.answered_at is not None, "only answered calls are chosen"
            result, asked = messages[each.answered_at], edited[each.asked_at]
            edited[each.answered_at] = replace(result, texts=(CLEARED,), is_error=False)
            uses = list(asked.uses)
            uses[each.use_at] = self._without_input(uses[each.use_at])
            edited[each.asked_at] = replace(asked, uses=tuple(uses))
        return edited

    def _without_input(self, use: ToolUse) -> ToolUse:
        return replace(use, arguments={}) if self._clears_input(use) else use

    def _clears_input(self, use: ToolUse) -> bool:
        return self.inputs if isinstance(self.inputs, bool) else use.name in self.inputs

    def _is_cleared(self, each: Exchange, messages: Sequence[Message]) -> bool:
        assert each.answered_at is not None, "only answered calls are looked at"
        use, is_done = each.use(messages), "".join(messages[each.answered_at].texts) == CLEARED
        return is_done and not (self._clears_input(use) and use.arguments)


@dataclass(frozen=True, slots=True)
class ClearToolUses(CountedEdit):
    """Clears once the prompt has more tokens, or more calls, than a threshold."""

    name: str
    clearing: Clearing
    tokens: int | None  # one of the two
    uses: int | None
    clear_at_least: int = 0  # tokens; fewer are not worth it

    async def apply(self, prompt: Prompt, desk: PromptDesk) -> tuple[Prompt, EditOutcome]:
        nothing = prompt, EditOutcome(self.name)
        if self.tokens is not None and not may_have(prompt, self.tokens):
            return nothing
        made = await desk.run(prompt, lambda: self._cleared(prompt))
        if made is None:
            return nothing
        edited, count = made
        before = await desk.count(prompt)
        if self.tokens is not None and before <= self.tokens:
            return nothing
        cleared = max(0, before - await desk.count(edited))
        if cleared < self.clear_at_least:
            return nothing
        return edited, EditOutcome(self.name, count, cleared)

    def _cleared(self, prompt: Prompt) -> tuple[Prompt, int] | None:
        messages = prompt.messages or ()
        if self.uses is not None and len(exchanges_of(messages)) <= self.uses:
            return None
        chosen = self.clearing.of(messages)
        if not chosen:
            return None
        return prompt.with_messages(self.clearing.clear(messages, chosen)), len(chosen)
