"""The prompt that extends an agent's context: its stored text as it is, and messages after it.

Templates render whole conversations only. So the new messages are rendered after a made-up
exchange, and what the template writes after the made-up answer is appended to the stored text:

    made up      |user ...|assistant ANSWER|<end>|user NEW|<end>|assistant
    stored       |system ...|user ...|assistant ... <end>|
    the prompt   |system ...|user ...|assistant ... <end>|user NEW|<end>|assistant
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fabric.errors import RejectedError
from fabric.ids import AgentKey
from fabric.record.manifest import Manifest
from fabric.record.pending_edits import rewritten
from fabric.turn.generation import ContinuedPrompt, GenerateRequest
from fabric.turn.messages import template_form
from node.limits import ANSWER_END_CHARS_MAX
from node.mlx.chat_tokenizer import ChatTokenizer
from node.prompt.encoder_threads import EncoderThreads

_QUESTION: Final = "ready?"
_ANSWER: Final = "ready-5e0c1d"  # text that no template writes by itself


@dataclass(frozen=True, slots=True)
class AppendedPrompts:
    """Prompts that extend the contexts of this node's agents; nothing is computed or kept."""

    tokenizer: ChatTokenizer
    threads: EncoderThreads
    owned_record: Callable[[AgentKey], Manifest | None]

    async def prompt(self, request: GenerateRequest) -> ContinuedPrompt:
        """Return the prompt; raise RejectedError if the template cannot append these messages."""
        assert request.identity.agent is not None, "the router names the agent"
        record = self.owned_record((request.tenant, request.identity.agent))
        if record is None or not record.text:
            return ContinuedPrompt(None)
        stored = rewritten(record).decode("utf-8", "replace")
        if request.prompt is not None:
            return ContinuedPrompt(stored + request.prompt)
        text = await self.threads.run(lambda: append(stored, self._render_after_answer(request)))
        return ContinuedPrompt(text)

    def _render_after_answer(self, request: GenerateRequest) -> str:
        exchange = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        messages = [*exchange, *(template_form(message) for message in request.messages or ())]
        text = self.tokenizer.rendered(messages, None, request.template_options).text
        _, answer, appended = text.partition(_ANSWER)
        if not answer:
            message = "this model's template does not let messages be appended: append text"
            raise RejectedError(message, code="unsupported_append", param="messages")
        return appended


def append(stored: str, appended: str) -> str:
    """Join the texts; an answer's end that both `stored` ends and `appended` begins with is one."""
    longest = min(len(appended), ANSWER_END_CHARS_MAX)
    end = next((at for at in range(longest, 0, -1) if stored.endswith(appended[:at])), 0)
    return stored + appended[end:]
