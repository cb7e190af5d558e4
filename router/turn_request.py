"""Request of a turn, as every API passes it to the rest of the router."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fabric.edit_mode import EditMode
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, OperationId, TenantId, TurnId
from fabric.sampling_defaults import SamplingDefault, filled_in
from fabric.turn.generation import (
    GenerateRequest,
    HeadLoan,
    Identity,
    IdentityKind,
    Priority,
    Resumption,
    Sampling,
    TurnTag,
)
from router.prompt import Prompt


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request of a turn; retries keep the operation's name."""

    operation: OperationId
    tenant: TenantId
    model: str
    identity: Identity
    sampling: Sampling
    prompt: Prompt
    priority: Priority = Priority.INTERACTIVE
    resume: Resumption | None = None
    was_admitted: bool = False  # by a node that has handed it over
    after: MigrationId | None = None  # the move whose commit it waits for on the target
    retain_s: float = 0.0  # within which the client announces its next turn
    prefetch: tuple[AgentId, ...] = ()  # agents whose turns are expected next
    near: NodeName | None = None  # preferred node while it is up, unless an agent is named
    beside: AgentId | None = None  # agent whose prompt gets another answer; the turn is not kept
    edits: EditMode | None = None  # None: by the agent's directives
    session: AgentId | None = None  # of a coding agent and its sub-agents; only a hint
    sub_agent: AgentId | None = None  # that sent the request; only a hint
    left_out: frozenset[str] = frozenset()  # sampling fields that are the node's to choose
    id: TurnId | None = None  # id of its request; None: the router creates one

    @property
    def is_kept(self) -> bool:
        """Whether the turn becomes part of an agent's memory."""
        return self.beside is None and not self.prompt.echo

    @property
    def key(self) -> AgentKey | None:
        """Tenant and agent, if the turn names one and is kept."""
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
        weight: float = 1.0,
        defaults: Iterable[SamplingDefault] = (),
        head: HeadLoan | None = None,
        tag: TurnTag | None = None,
    ) -> GenerateRequest:
        """Return the request for a node, at an epoch of the directory.

        `floor` returns the epoch up to which an agent was erased. `is_private` applies if the node
        starts the agent or takes it over. `weight` is the tenant's. `defaults` are the node's for
        what the client left out, and `head` names a node that may send a part of the prompt. `tag`
        names the turn.
        """
        prompt = self.prompt
        return GenerateRequest(
            operation=self.operation,
            tenant=self.tenant,
            identity=self.identity,
            sampling=replace(self.sampling, **filled_in(self.left_out, defaults)),
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
            plain_marks=prompt.plain_marks,
            after=self.after,
            erased_epoch=floor(self.key) if self.key is not None else 0,
            is_private=is_private,
            head=head,
            weight=weight,
            turn=tag,
        )
