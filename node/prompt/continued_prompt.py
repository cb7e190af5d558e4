"""Prompts that continue an agent's record: by new messages, or the answer of another node.

Templates render whole conversations only. So the new messages are rendered after a made-up
exchange, and what the template writes after the made-up answer is appended to the stored text:

    made up      |user ...|assistant ANSWER|<end>|user NEW|<end>|assistant
    stored       |system ...|user ...|assistant ... <end>|
    the prompt   |system ...|user ...|assistant ... <end>|user NEW|<end>|assistant
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from fabric.errors import ConflictError, RejectedError
from fabric.ids import AgentKey
from fabric.record.directed_messages import rewritten
from fabric.record.manifest import Manifest
from fabric.turn.generation import ContinuedPrompt, GenerateRequest, MatchKind, Resumption
from fabric.turn.messages import template_form
from fabric.turn.prompt_plan import PromptPlan
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


REASON = "continues an answer that was begun on another node"


def plan_resumption(record: Manifest, resume: Resumption) -> PromptPlan:
    """Plan to have the record's tokens in the cache and to feed the sampled one next.

    Raises ConflictError where the record does not end with this very answer.
    """
    count = record.prompt_tokens_count
    if not count or record.token_ids[count:] != resume.answer_ids:
        message = "the agent's context does not end with the answer that is to be continued"
        raise ConflictError(message, code="cannot_resume")
    ids, ends = list(record.token_ids), list(record.token_ends)
    return PromptPlan(
        text=record.text.encode(),
        ids=[*ids, resume.sampled],
        ends=[*ends, ends[-1]],
        kept_tokens=len(ids),
        match=MatchKind.EXTEND,
        reason=REASON,
    )


def without_answer(plan: PromptPlan, record: Manifest) -> PromptPlan:
    """Return the plan of the prompt alone: what follows it is counted as the answer."""
    count = record.prompt_tokens_count
    ends = plan.ends[:count]
    return replace(
        plan, text=plan.text[: ends[-1]], ids=plan.ids[:count], ends=ends, kept_tokens=count
    )
