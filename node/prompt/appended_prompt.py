"""The prompt that continues what an agent remembers: that text as it is, and more behind it.

Templates render whole conversations only. So what is to come is rendered behind one that is made
up, and what the template wrote behind its answer goes behind what the agent remembers:

    made up      |user ...|assistant ANSWER|<end>|user NEW|<end>|assistant
    remembered   |system ...|user ...|assistant ... <end>|
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
from node.prompt.prompt_encoder import PromptEncoder

_ASKED: Final = "ready?"
_ANSWER: Final = "ready-5e0c1d"  # no template writes that by itself


@dataclass(frozen=True, slots=True)
class AppendedPrompts:
    """Prompts that continue what agents of this node remember; nothing is computed or kept."""

    prompts: PromptEncoder
    owned_record: Callable[[AgentKey], Manifest | None]

    async def prompt(self, request: GenerateRequest) -> ContinuedPrompt:
        """Return the prompt; raise RejectedError where the template takes no such messages."""
        assert request.identity.agent is not None, "the router names whom it asks about"
        record = self.owned_record((request.tenant, request.identity.agent))
        if record is None or not record.text:
            return ContinuedPrompt(None)
        stored = rewritten(record).decode("utf-8", "replace")
        if request.prompt is not None:
            return ContinuedPrompt(stored + request.prompt)
        encoders = self.prompts.encoders
        return ContinuedPrompt(await encoders.run(lambda: joined(stored, self._behind(request))))

    def _behind(self, request: GenerateRequest) -> str:
        before = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": _ANSWER},
        ]
        messages = [*before, *(template_form(each) for each in request.messages or ())]
        options = request.template_options
        text = self.prompts.tokenizer.rendered(messages, None, options).text
        _, answer, behind = text.partition(_ANSWER)
        if not answer:
            message = "this model's template does not let messages be appended: append text"
            raise RejectedError(message, code="unsupported_append", param="messages")
        return behind


def joined(stored: str, behind: str) -> str:
    """Put `behind` after `stored`, which may end with how `behind` begins: an answer's end."""
    most = min(len(behind), ANSWER_END_CHARS_MAX)
    end = next((at for at in range(most, 0, -1) if stored.endswith(behind[:at])), 0)
    return stored + behind[end:]
