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
from fabric.record.directed_messages import edits_of, pending_directives, rewrite_text
from fabric.record.manifest import Manifest
from fabric.turn.control_marks import ControlMarks
from fabric.turn.generation import ContinuedPrompt, GenerateRequest, MatchKind, Resumption
from fabric.turn.messages import template_form
from fabric.turn.prompt_plan import PromptPlan
from node.dialect.plain_marks import RestoredText
from node.limits import ANSWER_END_CHARS_MAX
from node.mlx.chat_tokenizer import ChatTokenizer
from node.prompt.prompt_encoder import EncoderThreads

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
        return await self.threads.run(lambda: self._extend_record(record, request))

    def _extend_record(self, record: Manifest, request: GenerateRequest) -> ContinuedPrompt:
        stored = rewrite_text(record).decode("utf-8", "replace")
        plain = plain_marks_of(record, self.tokenizer.control_marks)
        if request.prompt is not None:
            return ContinuedPrompt(stored + request.prompt, plain or None)
        appended = self._render_after_answer(request)
        text = append(stored, appended.text)
        moved_bytes = len(text.encode()) - len(appended.text.encode())
        places = (at + moved_bytes for at in appended.plain)
        plain += tuple(at for at in places if at >= len(stored.encode()))
        return ContinuedPrompt(text, plain or None)

    def _render_after_answer(self, request: GenerateRequest) -> RestoredText:
        exchange = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        messages = [*exchange, *(template_form(message) for message in request.messages or ())]
        rendered = self.tokenizer.rendered(messages, None, request.template_options)
        before, answer, appended = rendered.text.partition(_ANSWER)
        if not answer:
            message = "this model's template does not let messages be appended: append text"
            raise RejectedError(message, code="unsupported_append", param="messages")
        start = len((before + answer).encode())
        return RestoredText(appended, tuple(at - start for at in rendered.plain if at >= start))


def plain_marks_of(record: Manifest, marks: ControlMarks) -> tuple[int, ...]:
    """Return where a record's text has plain marks, with its pending directives applied."""
    directives, done, moved_bytes, places = pending_directives(record), 0, 0, []
    plain = marks.plain_in(record.text.encode(), record.token_ids, record.token_ends)
    for (start, end, size_bytes), directive in zip(edits_of(directives), directives, strict=True):
        places += [at + moved_bytes for at in plain if done <= at < start]
        replacement = (directive.replacement or "").encode("utf-8", "replace")
        places += [start + moved_bytes + at for at in marks.plain_in(replacement, (), ())]
        moved_bytes += size_bytes - (end - start)
        done = end
    return (*places, *(at + moved_bytes for at in plain if at >= done))


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
    """Return the plan of the prompt alone; the tokens after it count as the answer."""
    count = record.prompt_tokens_count
    ends = plan.ends[:count]
    return replace(
        plan, text=plan.text[: ends[-1]], ids=plan.ids[:count], ends=ends, kept_tokens=count
    )
