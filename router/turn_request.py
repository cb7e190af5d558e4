"""One turn as the APIs hand it to the rest of the router, whatever their shape was."""

from collections.abc import Callable
from dataclasses import dataclass

from fabric.edit_mode import EditMode
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, OperationId, TenantId
from fabric.turn.generation import (
    GenerateRequest,
    Identity,
    IdentityKind,
    Priority,
    Resumption,
    Sampling,
)
from router.prompt import Prompt


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request of a turn; the operation keeps its name when it is retried."""

    operation: OperationId
    tenant: TenantId
    model: str
    identity: Identity
    sampling: Sampling
    prompt: Prompt
    priority: Priority = Priority.INTERACTIVE
    resume: Resumption | None = None
    was_admitted: bool = False  # by a node that handed it over
    after: MigrationId | None = None  # the move that it comes ahead of
    retain_s: float = 0.0  # in which the client says that it will come back
    prefetch: tuple[AgentId, ...] = ()  # whose turns are expected next
    near: NodeName | None = None  # where to go while that node is up, unless an agent is named
    beside: AgentId | None = None  # whose prompt it answers once more: nothing of it is kept
    edits: EditMode | None = None  # None: as the agent's directives say

    @property
    def is_kept(self) -> bool:
        """Say whether an agent remembers it."""
        return self.beside is None and not self.prompt.echo

    @property
    def key(self) -> AgentKey | None:
        """The agent that it names."""
        if not self.is_kept:
            return None
        agent = self.identity.agent if self.identity.kind is IdentityKind.AGENT else None
        return (self.tenant, agent) if agent is not None else None

    def request(
        self,
        epoch: int,
        floor: Callable[[AgentKey], int] = lambda _: 0,
        *,
        is_private: bool = False,
    ) -> GenerateRequest:
        """Spell the turn for a node, at the epoch that the directory knows.

        `floor` says up to which epoch an agent was erased, `is_private` whether its memory is for
        itself alone, for a node that begins it anew or takes it over.
        """
        prompt = self.prompt
        return GenerateRequest(
            operation=self.operation,
            tenant=self.tenant,
            identity=self.identity,
            sampling=self.sampling,
            messages=prompt.messages,
            prompt=prompt.text,
            prompt_ids=prompt.ids,
            continues=prompt.continues,
            echo=prompt.echo,
            is_kept=self.is_kept,
            beside=self.beside,
            edits=self.edits,
            tools=prompt.tools,
            template_options=prompt.template_options,
            reads_calls=prompt.reads_calls,
            calls=prompt.calls,
            sketch=prompt.sketch,
            epoch=epoch,
            priority=self.priority,
            resume=self.resume,
            retain_s=self.retain_s,
            was_admitted=self.was_admitted,
            extends=prompt.extends,
            after=self.after,
            erased_epoch=floor(self.key) if self.key is not None else 0,
            is_private=is_private,
        )
