"""What one API's adapter does: its requests become turns, and turns become its answers."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import Admitted, Identity, Priority, Sampling, ToolCallPart
from router.api.edit_fields import AS_CONFIGURED, WantedEdits
from router.http.dialect import ErrorDialect
from router.policies.counted_edit import CountedEdit
from router.policies.policy import EditOutcome
from router.prompt import Prompt
from router.turn_request import TurnRequest
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


@dataclass(frozen=True, slots=True)
class Several:
    """Which answers a request wants, where it is more than one."""

    prompts: tuple[Prompt, ...]
    count: int  # of answers to each
    shown: int  # of those, the most probable


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request; a dialect adds what its answers depend on."""

    model: str
    identity: Identity
    prompt: Prompt
    sampling: Sampling
    stream: bool
    priority: Priority
    prefetch: tuple[AgentId, ...]  # whose turns are expected next
    retain_s: float = field(default=0.0, kw_only=True)  # in which the client will come back
    ignored: tuple[str, ...] = field(default=(), kw_only=True)  # what has no effect here
    several: Several | None = field(default=None, kw_only=True)
    edits: WantedEdits = field(default=AS_CONFIGURED, kw_only=True)
    own_edits: tuple[CountedEdit, ...] = field(default=(), kw_only=True)  # of the dialect
    is_whole_conversation: bool = field(default=True, kw_only=True)  # False: nothing to edit
    outcomes: tuple[EditOutcome, ...] = field(default=(), kw_only=True)  # of policies and edits

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
        )


A = TypeVar("A", bound=Asked)
NumberedParts = AsyncGenerator[tuple[int, AnswerEvent | ToolCallPart], None]


class ApiAdapter(ErrorDialect, Protocol[A]):
    """One route's dialect, both ways; `error` says in it what went wrong."""

    path: str
    streams_calls: bool  # its frames are made of calls while they are written, too
    idle: bytes  # a frame that means nothing, for while nothing is said

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> A:
        """Check a request; raise RejectedError naming the first parameter that is wrong."""

    async def recalled(self, tenant: TenantId, asked: A) -> A:
        """Complete a request by what was said before; in most dialects it brings all of it."""
        return asked

    def whole(self, asked: A, admitted: Admitted, answer: WholeAnswer) -> Any:
        """Spell a finished answer as JSON."""

    def frames(
        self, asked: A, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """Spell an answer as it comes, in frames of `router.http.sse`."""


class SeveralAdapter(ApiAdapter[A], Protocol[A]):
    """A dialect in which one request may want several answers; each prompt is admitted once."""

    def whole(self, asked: A, admitted: Admitted, answer: WholeAnswer) -> Any:
        """Spell the only one."""
        return self.all_whole(asked, [admitted], [answer])

    def frames(
        self, asked: A, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """Spell the only one as it comes."""
        return self.all_frames(asked, lambda: [admitted], _numbered(events))

    def all_whole(
        self, asked: A, admitted: Sequence[Admitted], answers: Sequence[WholeAnswer]
    ) -> Any:
        """Spell finished answers as JSON."""

    def all_frames(
        self, asked: A, admitted: Callable[[], Sequence[Admitted]], parts: NumberedParts
    ) -> AsyncGenerator[bytes, None]:
        """Spell answers as they come; `admitted` lists all once they have ended."""


async def _numbered(events: AsyncGenerator[AnswerEvent | ToolCallPart, None]) -> NumberedParts:
    async with aclosing(events):
        async for event in events:
            yield 0, event
