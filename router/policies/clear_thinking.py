"""Policy of Anthropic's dialect that clears the reasoning of all but the last turns."""

from dataclasses import dataclass

from fabric.turn.messages import Message, MessageRole
from router.policies.exchanges import user_turns
from router.policies.policy import CountedEdit, EditOutcome, PromptServices
from router.policies.strip_thinking import without_thoughts
from router.prompt import Prompt


@dataclass(frozen=True, slots=True)
class ClearThinking(CountedEdit):
    """Clearing of reasoning; a turn is all answers between two user messages."""

    name: str
    keep: int  # turns with reasoning, including the current one

    async def apply(self, prompt: Prompt, services: PromptServices) -> tuple[Prompt, EditOutcome]:
        edited, count = await services.run(prompt, lambda: self._clear_messages(prompt))
        if not count:
            return edited, EditOutcome(self.name)
        cleared = await services.count(prompt) - await services.count(edited)
        return edited, EditOutcome(self.name, count, max(0, cleared))

    def _clear_messages(self, prompt: Prompt) -> tuple[Prompt, int]:
        messages = prompt.messages or ()
        begins = thinking_turns(messages)
        if len(begins) <= self.keep:
            return prompt, 0
        end = begins[len(begins) - self.keep]
        return prompt.with_messages(without_thoughts(messages, end)), len(begins) - self.keep


def thinking_turns(messages: tuple[Message, ...]) -> list[int]:
    """Return the first message index of each turn with reasoning."""
    starts = [0, *user_turns(messages)]
    ends = [*starts[1:], len(messages)]
    return [
        start
        for start, end in zip(starts, ends, strict=True)
        if any(m.role is MessageRole.ASSISTANT and m.reasoning for m in messages[start:end])
    ]
