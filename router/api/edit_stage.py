"""Edits of a request's conversation, before its turn.

Policies (the operator's or the request's) come first, then the edits of its dialect's own fields,
and last its truncation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fabric.edit_mode import TRUNCATES, EditMode
from fabric.ids import TenantId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from router.api.adapter import ApiRequest
from router.api.edit_fields import POLICIES_HEADER, EditOptions
from router.fleet.fleet import Fleet
from router.fleet.prompt_queries import count_tokens
from router.fresh_ids import fresh_operation
from router.large_work import run_sized
from router.policies.editing import Editing
from router.policies.policy import CountedEdit, EditOutcome
from router.policies.truncation import Truncation
from router.prompt import Prompt
from router.turn_request import TurnRequest

A = TypeVar("A", bound=ApiRequest)
T = TypeVar("T")


class EditStage:
    """Edits and policies of conversations, for every route."""

    def __init__(
        self, fleet: Fleet, editing: Editing, mode: EditMode | None, truncation: str
    ) -> None:
        self._truncation = truncation
        self._fleet = fleet
        self._editing = editing
        self._mode = mode

    def mode(self, options: EditOptions) -> EditMode | None:
        """Return how the cache after an edit is treated; None: by the agent's directives."""
        return self._mode if options.mode is None else options.mode

    async def edited(self, tenant: TenantId, request: A, model: str) -> A:
        """Return the request with its edits applied; raise RejectedError for unknown policies."""
        truncation = request.edits.truncation or request.truncation or self._truncation
        own = request.own_edits
        if truncation == TRUNCATES and not request.continues_memory:
            own += (Truncation(request.sampling.max_tokens),)
        if request.prompt.messages is None or not request.is_whole_conversation:
            return await self._edit_prompts(tenant, request, model, own) if own else request
        prompt, outcomes = await self.edited_prompt(
            tenant, request.prompt, model, request.edits, own
        )
        batch = request.batch
        if batch is not None:
            batch = replace(batch, prompts=(prompt,) * len(batch.prompts))
        return replace(request, prompt=prompt, batch=batch, outcomes=outcomes)

    async def _edit_prompts(
        self, tenant: TenantId, request: A, model: str, own: tuple[CountedEdit, ...]
    ) -> A:
        """Return a request of raw prompts with each of them edited."""
        batch = request.batch
        prompts = (request.prompt,) if batch is None else batch.prompts
        worker, outcomes = PromptWorker(self._fleet, tenant, model), []
        for edit in own:
            edited = [await edit.apply(prompt, worker) for prompt in prompts]
            prompts = tuple(prompt for prompt, _ in edited)
            count = sum(outcome.count for _, outcome in edited)
            cleared = sum(outcome.cleared_tokens for _, outcome in edited)
            outcomes.append(EditOutcome(edit.name, count, cleared))
        batch = None if batch is None else replace(batch, prompts=prompts)
        return replace(request, prompt=prompts[0], batch=batch, outcomes=tuple(outcomes))

    async def edited_prompt(
        self,
        tenant: TenantId,
        prompt: Prompt,
        model: str,
        options: EditOptions,
        own: tuple[CountedEdit, ...],
    ) -> tuple[Prompt, tuple[EditOutcome, ...]]:
        """Return a prompt with its edits, and the outcome of each."""
        worker = PromptWorker(self._fleet, tenant, model)
        policies, messages = self._editing.select(options.policies), prompt.messages or ()
        outcomes: list[EditOutcome] = []
        if policies:
            edited = await self._editing.edited(
                tenant, messages, prompt.bytes_count, model, policies
            )
            outcomes += edited.outcomes
            if edited.messages != messages:
                prompt = await worker.run(prompt, partial(prompt.with_messages, edited.messages))
        for edit in own:
            prompt, outcome = await edit.apply(prompt, worker)
            outcomes.append(outcome)
        return prompt, tuple(outcomes)


def edit_headers(outcomes: Sequence[EditOutcome]) -> dict[str, str]:
    """Return the header that lists the edits of a conversation, and what each did."""
    return {POLICIES_HEADER: "; ".join(map(str, outcomes))} if outcomes else {}


@dataclass(frozen=True, slots=True)
class PromptWorker:
    """Token counts and edits of one tenant's prompts for one model."""

    fleet: Fleet
    tenant: TenantId
    model: str

    @property
    def context_tokens_max(self) -> int | None:
        """The shortest context among the model's nodes, any of which may get the turn."""
        return self.fleet.context_tokens_max(self.model)

    async def count(self, prompt: Prompt) -> int:
        """Return a prompt's token count by a node; raise RetryLaterError if none answers."""
        turn = TurnRequest(
            operation=fresh_operation(),
            tenant=self.tenant,
            model=self.model,
            identity=Identity(IdentityKind.CONTENT),
            sampling=Sampling(),
            prompt=prompt,
        )
        return await count_tokens(self.fleet, turn)

    async def run(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """Run `work` here or, for a long prompt, in a thread."""
        return await run_sized(self.tenant, prompt.bytes_count, work)
