"""Prepare a request's prompt: restore, direct, render, begin the answer, then encode and match.

    GenerateRequest --run--> SpelledPrompt --plan, with the agent's record--> PlannedPrompt

`run` needs no agent, `plan` is called while its turn holds the agent. Work that grows with the
prompt runs on the encoder threads.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fabric.ids import TenantId
from fabric.limits import AGENT_TOKENS_MAX
from fabric.record.directive import Directive
from fabric.record.manifest import Manifest
from fabric.record.message_positions import find_positions
from fabric.turn.conversation_form import FormChain
from fabric.turn.generation import GenerateRequest, TokenCount
from fabric.turn.prompt_plan import PromptLimit, PromptPlan
from node.dialect.folding import Rendered
from node.grammar.answer_matcher import AnswerMatcher
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.thought_budget import ThoughtBudget, ThoughtBudgets
from node.prompt.answer_grammars import AnswerGrammars
from node.prompt.continued_prompt import plan_resumption
from node.prompt.directed_request import DirectedRequest, apply_directives, follow_record
from node.prompt.earlier_answers import (
    KnownAnswers,
    LocatedRequest,
    RestoredRequest,
    ShownAnswer,
    locate_messages,
    restore_answers,
)
from node.prompt.prompt_encoder import EncoderThreads, PromptEncoder


class KnownConversations(Protocol):
    """Look-up of the conversation that a request continues."""

    def answers(
        self, request: GenerateRequest, places: Sequence[int], forms: FormChain | None
    ) -> KnownAnswers:
        """Return earlier answers at these places."""
        ...

    def directives(self, request: GenerateRequest) -> tuple[Directive, ...]:
        """Return the stored directives of the request's agent."""
        ...


@dataclass(frozen=True, slots=True)
class SpelledPrompt:
    """A request's prompt as text, and its answer, begun."""

    directives: tuple[Directive, ...]  # the agent's, applied or not
    restored: RestoredRequest
    directed: DirectedRequest
    rendered: Rendered
    answer: Answer
    shown: ShownAnswer  # the answer's shown part, including other nodes' tokens
    matcher: AnswerMatcher | None  # for an answer with an output format
    limit: PromptLimit
    budget: ThoughtBudget | None  # for the answer's thoughts


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt as tokens, matched with the record that its turn continues."""

    restored: RestoredRequest
    directed: DirectedRequest
    plan: PromptPlan


@dataclass(frozen=True, slots=True)
class PromptPipeline:
    """Preparation of a node's prompts; used on its event loop."""

    tokenizer: ChatTokenizer
    encoder: PromptEncoder
    threads: EncoderThreads
    grammars: AnswerGrammars
    salt_of: Callable[[TenantId], bytes]
    budgets: ThoughtBudgets

    async def run(
        self, request: GenerateRequest, known: KnownConversations, is_unwanted: Callable[[], bool]
    ) -> SpelledPrompt:
        """Spell a request's prompt; raise RejectedError where it has no valid one."""
        limit = self.encoder.limit(is_unwanted)
        return await self._spell(await self._locate(request), known, limit)

    async def refresh(self, prompt: SpelledPrompt, known: KnownConversations) -> SpelledPrompt:
        """Spell a prompt again if its agent's directives have changed since."""
        located = prompt.restored.located
        request = located.request
        if request.resume is not None or known.directives(request) == prompt.directives:
            return prompt
        return await self._spell(located, known, prompt.limit)

    async def plan(self, prompt: SpelledPrompt, record: Manifest) -> PlannedPrompt:
        """Encode a prompt and match it with its agent's record; raise RejectedError."""
        directed, rendered, limit = prompt.directed, prompt.rendered, prompt.limit
        directed = follow_record(directed, record)
        request, restored = directed.request, prompt.restored
        if request.resume is not None:
            planned = PlannedPrompt(restored, directed, plan_resumption(record, request.resume))
        else:
            planned = await self.threads.run(
                lambda: self._encode(restored, directed, record, rendered, limit),
                len(rendered.text),
            )
        self.encoder.check_plan(request, planned.plan)
        return planned

    async def count(self, request: GenerateRequest) -> TokenCount:
        """Return how many tokens a prompt has, also where it is longer than the context."""
        hung_up = threading.Event()
        limit = PromptLimit(AGENT_TOKENS_MAX, None, hung_up.is_set)
        try:
            located = (await self._locate(request)).request
            rendered = await self.threads.run(lambda: self.encoder.render(located, limit))
            size_bytes = len(rendered.text) if rendered.ends is None else 0
            return TokenCount(
                await self.threads.run(
                    lambda: self.encoder.count(located, rendered, limit), size_bytes
                )
            )
        finally:
            hung_up.set()  # a disconnected client stops the encoding thread, too

    def close(self) -> None:
        self.threads.close()
        self.grammars.close()

    async def _locate(self, request: GenerateRequest) -> LocatedRequest:
        """Hash a request's messages, on an encoder thread if it has any."""
        defaults = self.tokenizer.default_options
        if not request.messages:
            return locate_messages(request, defaults)
        return await self.threads.run(lambda: locate_messages(request, defaults))

    async def _spell(
        self, located: LocatedRequest, known: KnownConversations, limit: PromptLimit
    ) -> SpelledPrompt:
        source, shown = located.request, ShownAnswer()
        directives = known.directives(source)
        answers = known.answers(source, located.answer_places, located.forms)
        salt = self.salt_of(source.tenant)

        def spell() -> SpelledPrompt:
            restored = restore_answers(located, answers)
            directed = apply_directives(restored.request, directives, salt, source.messages)
            rendered = self.encoder.render(directed.request, limit)
            begun = rendered.begun
            answer = self._begin_answer(directed.request, begun, shown)
            budget = self._begin_budget(directed.request, begun)
            return SpelledPrompt(
                directives,
                restored,
                directed,
                rendered,
                answer,
                shown,
                None,
                limit,
                budget,
            )

        prompt = await self.threads.run(spell)
        matcher = await self.grammars.begin(prompt.directed.request, prompt.rendered.begun)
        return prompt if matcher is None else replace(prompt, matcher=matcher)

    def _begin_answer(self, request: GenerateRequest, begun: str, shown: ShownAnswer) -> Answer:
        """Return the answer that the prompt has `begun`, with other nodes' part of it."""
        answer = self._empty_answer(request, begun)
        if request.resume is not None:
            for token in request.resume.answer_ids:
                shown.add(answer.push(token))
        return answer

    def _begin_budget(self, request: GenerateRequest, begun: str) -> ThoughtBudget | None:
        """Return the budget of the thoughts of the answer that the prompt has `begun`, if any."""
        if not self.budgets.applies(request):
            return None
        return self.budgets.begin(request, begun, self._empty_answer(request, begun))

    def _empty_answer(self, request: GenerateRequest, begun: str) -> Answer:
        return Answer(
            self.tokenizer,
            begun,
            request.sampling.stop,
            request.tools if request.reads_calls else None,
            is_chat=request.messages is not None or request.extends,
            call_seed=request.operation,
            choice=request.calls,
        )

    def _encode(
        self,
        restored: RestoredRequest,
        directed: DirectedRequest,
        record: Manifest,
        rendered: Rendered,
        limit: PromptLimit,
    ) -> PlannedPrompt:
        """Encode a prompt and find its messages between the template's marks."""
        plan = self.encoder.plan(directed.request, record, rendered, limit)
        plan = replace(plan, note=restored.note)
        if directed.sent:
            ends, markup = plan.ends, self.tokenizer.markup_ids
            marks = [
                (ends[at - 1] if at else 0, ends[at])
                for at, token in enumerate(plan.ids)
                if token in markup
            ]
            positions = find_positions(directed.sent, plan.text, marks)
            directed = replace(directed, positions=positions, sent=())
        return PlannedPrompt(restored, directed, plan)
