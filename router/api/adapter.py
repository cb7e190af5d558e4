"""Adapters of the APIs: they turn requests into turns, and turns into answers."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import Admitted, Identity, Priority, Sampling, ToolCallPart
from router.api.edit_fields import AS_CONFIGURED, EditOptions
from router.http.errors import ErrorDialect
from router.policies.policy import CountedEdit, EditOutcome
from router.prompt import Prompt
from router.turn_request import TurnRequest
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Prompts and answer counts of a request for several answers."""

    prompts: tuple[Prompt, ...]
    count: int  # answers to each prompt
    shown: int  # answers returned of those, the most probable ones


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """Checked request; a dialect adds what its answers depend on."""

    model: str
    identity: Identity
    prompt: Prompt
    sampling: Sampling
    stream: bool
    priority: Priority
    prefetch: tuple[AgentId, ...]  # agents whose turns are expected next
    retain_s: float = field(default=0.0, kw_only=True)  # how long the client expects to come back
    # Fields without effect on this server.
    ignored: tuple[str, ...] = field(default=(), kw_only=True)
    batch: AnswerBatch | None = field(default=None, kw_only=True)
    edits: EditOptions = field(default=AS_CONFIGURED, kw_only=True)
    # Of the dialect's own fields.
    own_edits: tuple[CountedEdit, ...] = field(default=(), kw_only=True)
    truncation: str | None = field(default=None, kw_only=True)  # by the dialect's own field
    is_whole_conversation: bool = field(default=True, kw_only=True)  # False: no turns to edit
    continues_memory: bool = field(default=False, kw_only=True)  # True: nothing is truncated
    outcomes: tuple[EditOutcome, ...] = field(default=(), kw_only=True)  # of policies and edits
    left_out: frozenset[str] = field(default=frozenset(), kw_only=True)  # of its sampling
    session: AgentId | None = field(default=None, kw_only=True)  # by a header of coding agents
    sub_agent: AgentId | None = field(
        default=None, kw_only=True
    )  # that sent the request; only a hint

    def turn(self, operation: OperationId, tenant: TenantId) -> TurnRequest:
        return TurnRequest(
            operation=operation,
            tenant=tenant,
            model=self.model,
            identity=self.identity,
            sampling=self.sampling,
            prompt=self.prompt,
            priority=self.priority,
            prefetch=self.prefetch,
            retain_s=self.retain_s,
            left_out=self.left_out,
            session=self.session,
            sub_agent=self.sub_agent,
        )


A = TypeVar("A", bound=ApiRequest)
NumberedParts = AsyncGenerator[tuple[int, AnswerEvent | ToolCallPart], None]


class ApiAdapter(ErrorDialect, Protocol[A]):
    """Dialect of one route: its requests, answers and errors."""

    path: str
    streams_calls: bool  # its frames stream calls while they are generated
    idle: bytes  # a keep-alive frame

    def parse(self, headers: Mapping[str, str], sent: dict[str, Any], /) -> A:
        """Check a request; raise RejectedError naming the first parameter that is wrong."""

    async def with_history(self, tenant: TenantId, request: A) -> A:
        """Return the request with its earlier messages; in most dialects it has them."""
        return request

    def whole(self, request: A, admitted: Admitted, answer: WholeAnswer) -> Any:
        """Return a finished answer as JSON."""

    async def kept(self) -> None:
        """Wait until an answer's stored data survives this router; most dialects store nothing."""
        await asyncio.sleep(0)

    def frames(
        self, request: A, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield an answer as it is generated, in frames of `router.http.sse`."""


class BatchAdapter(ApiAdapter[A], Protocol[A]):
    """Dialect in which a request may ask for several answers; each prompt is admitted once."""

    def whole(self, request: A, admitted: Admitted, answer: WholeAnswer) -> Any:
        """Return the only answer as JSON."""
        return self.all_whole(request, [admitted], [answer])

    def frames(
        self, request: A, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the only answer as it is generated."""
        return self.all_frames(request, lambda: [admitted], _number_events(events))

    def all_whole(
        self, request: A, admitted: Sequence[Admitted], answers: Sequence[WholeAnswer]
    ) -> Any:
        """Return finished answers as JSON."""

    def all_frames(
        self, request: A, admitted: Callable[[], Sequence[Admitted]], parts: NumberedParts
    ) -> AsyncGenerator[bytes, None]:
        """Yield answers as they are generated; `admitted` lists all once they have ended."""


async def _number_events(events: AsyncGenerator[AnswerEvent | ToolCallPart, None]) -> NumberedParts:
    async with aclosing(events):
        async for event in events:
            yield 0, event
