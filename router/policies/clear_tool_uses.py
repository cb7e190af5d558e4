"""Policy of Anthropic's dialect that clears results of old tool calls, and optionally arguments."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fabric.turn.messages import Message, MessageRole, ToolUse
from router.policies.exchanges import Exchange, exchanges_of, last_of
from router.policies.policy import CountedEdit, EditOutcome, PromptServices, can_reach_tokens
from router.prompt import Prompt

CLEARED: Final = "[This tool result was cleared.]"


@dataclass(frozen=True, slots=True)
class Clearing:
    """Selection of the calls to clear."""

    keep: int  # last calls that are kept, of any tool
    exclude: Collection[str]  # tools whose calls are kept
    inputs: bool | Collection[str] = False  # tools whose arguments are cleared, too

    def of(self, messages: Sequence[Message]) -> list[Exchange]:
        """Return the calls to clear; results that the model has not read yet are kept."""
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
        """Return the messages with some calls cleared."""
        edited = list(messages)
        for each in chosen:
            assert each.answered_at is not None, "only answered calls are chosen"
            result, call = messages[each.answered_at], edited[each.asked_at]
            edited[each.answered_at] = replace(result, texts=(CLEARED,), is_error=False)
            uses = list(call.uses)
            uses[each.use_at] = self._without_input(uses[each.use_at])
            edited[each.asked_at] = replace(call, uses=tuple(uses))
        return edited

    def _without_input(self, use: ToolUse) -> ToolUse:
        return replace(use, arguments={}) if self._clears_input(use) else use

    def _clears_input(self, use: ToolUse) -> bool:
        return self.inputs if isinstance(self.inputs, bool) else use.name in self.inputs

    def _is_cleared(self, each: Exchange, messages: Sequence[Message]) -> bool:
        assert each.answered_at is not None, "only answered calls are checked"
        use, is_done = each.use(messages), "".join(messages[each.answered_at].texts) == CLEARED
        return is_done and not (self._clears_input(use) and use.arguments)


@dataclass(frozen=True, slots=True)
class ClearToolUses(CountedEdit):
    """Clearing of calls once the prompt exceeds a number of tokens or calls."""

    name: str
    clearing: Clearing
    tokens: int | None  # threshold; either this or `uses` is set
    uses: int | None
    clear_at_least: int = 0  # tokens; smaller edits are discarded

    async def apply(self, prompt: Prompt, services: PromptServices) -> tuple[Prompt, EditOutcome]:
        nothing = prompt, EditOutcome(self.name)
        if self.tokens is not None and not can_reach_tokens(prompt, self.tokens):
            return nothing
        outcome = await services.run(prompt, lambda: self._clear_messages(prompt))
        if outcome is None:
            return nothing
        edited, count = outcome
        before = await services.count(prompt)
        if self.tokens is not None and before <= self.tokens:
            return nothing
        cleared = max(0, before - await services.count(edited))
        if cleared < self.clear_at_least:
            return nothing
        return edited, EditOutcome(self.name, count, cleared)

    def _clear_messages(self, prompt: Prompt) -> tuple[Prompt, int] | None:
        messages = prompt.messages or ()
        if self.uses is not None and len(exchanges_of(messages)) <= self.uses:
            return None
        chosen = self.clearing.of(messages)
        if not chosen:
            return None
        return prompt.with_messages(self.clearing.clear(messages, chosen)), len(chosen)
