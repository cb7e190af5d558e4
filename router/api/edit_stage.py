"""Edits of a request's conversation, between its parsing and its turn.

First the policies, which are the operator's or the request's; then what its dialect asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fabric.edit_mode import EditMode
from fabric.ids import TenantId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from router.api.adapter import Asked
from router.api.edit_fields import POLICIES_HEADER, WantedEdits
from router.fleet.fleet import Fleet
from router.fleet.prompt_queries import count_tokens
from router.fresh_ids import fresh_operation
from router.large_work import run_sized
from router.policies.counted_edit import CountedEdit
from router.policies.editing import Editing
from router.policies.policy import EditOutcome
from router.prompt import Prompt
from router.turn_request import TurnRequest

A = TypeVar("A", bound=Asked)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EditedPrompt:
    """A prompt as the model is to read it, and what was done to it."""

    prompt: Prompt
    outcomes: tuple[EditOutcome, ...]


class EditStage:
    """Applies edits and policies to conversations, for every route."""

    def __init__(self, fleet: Fleet, editing: Editing, mode: EditMode | None) -> None:
        self._fleet = fleet
        self._editing = editing
        self._mode = mode

    def mode(self, wanted: WantedEdits) -> EditMode | None:
        """Say what becomes of the memory behind an edit; None: as the agent's directives say."""
        return self._mode if wanted.mode is None else wanted.mode

    async def edited(self, tenant: TenantId, asked: A, model: str) -> A:
        """Return the request with its conversation edited; raise RejectedError for wrong wishes."""
        if asked.prompt.messages is None or not asked.is_whole_conversation:
            return asked
        made = await self.edited_prompt(tenant, asked.prompt, model, asked.edits, asked.own_edits)
        several = asked.several
        if several is not None:
            several = replace(several, prompts=(made.prompt,) * len(several.prompts))
        return replace(asked, prompt=made.prompt, several=several, outcomes=made.outcomes)

    async def edited_prompt(
        self,
        tenant: TenantId,
        prompt: Prompt,
        model: str,
        wanted: WantedEdits,
        own: tuple[CountedEdit, ...],
    ) -> EditedPrompt:
        """Edit one prompt."""
        desk = OnePromptDesk(self._fleet, tenant, model)
        policies, said = self._editing.chosen(wanted.policies), prompt.messages or ()
        outcomes: list[EditOutcome] = []
        if policies:
            made = await self._editing.edited(tenant, said, prompt.bytes_count, model, policies)
            outcomes += made.outcomes
            if made.messages != said:
                prompt = await desk.run(prompt, partial(prompt.with_messages, made.messages))
        for edit in own:
            prompt, outcome = await edit.apply(prompt, desk)
            outcomes.append(outcome)
        return EditedPrompt(prompt, tuple(outcomes))


def edit_headers(outcomes: Sequence[EditOutcome]) -> dict[str, str]:
    """Say which policies and edits a conversation went through, and what each did."""
    return {POLICIES_HEADER: "; ".join(map(str, outcomes))} if outcomes else {}


@dataclass(frozen=True, slots=True)
class OnePromptDesk:
    """Counts and rewrites one tenant's prompts for one model."""

    fleet: Fleet
    tenant: TenantId
    model: str

    @property
    def context_tokens_max(self) -> int | None:
        """The shortest context: any node that serves the model may get the turn."""
        members = self.fleet.membership.members
        views = (member.view for member in members if self.fleet.is_up(member.name))
        known = (view.context_tokens_max for view in views if view and view.model == self.model)
        return min(known, default=None)

    async def count(self, prompt: Prompt) -> int:
        """Ask a node; raise RetryLaterError where none answers."""
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
        """Do it here, or where it is long in a thread."""
        return await run_sized(self.tenant, prompt.bytes_count, work)
