"""Fabric client of runs that calls the router's services in the same process.

Runs do not call the router over loopback: a run resumed after a restart has no request with a key
to send, and the router stores only digests of keys. The client acts for the tenant that started the
run. A question becomes the request that a chat is parsed into, with the same policies, limits of
answers, placement and admission. Runs, and the agents that a run asks at once, are limited in place
of bodies and connections.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fabric.control.directive_calls import DirectAgent, MemoryView, ReadMemory
from fabric.edit_mode import EDIT_MODES
from fabric.errors import FabricError, NotFoundError, RejectedError, RetryLaterError
from fabric.ids import DEFAULT_TENANT, AgentId, OperationId, TenantId
from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
from fabric.ports import Clock
from fabric.sampling_defaults import chosen_or_built_in, left_out_fields
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Admitted,
    Delta,
    Identity,
    IdentityKind,
    Priority,
    Sampling,
    ToolCallPart,
    ToolCalls,
)
from router.admin.directive_fields import (
    DIRECTIVES,
    DirectiveOrigin,
    place_directives,
    require_held,
)
from router.api.adapter import ApiRequest
from router.api.edit_fields import EditOptions
from router.api.turn_route import TurnServices, turn_of
from router.http.errors import status_of
from router.large_work import run_sized, weigh
from router.prompt import chat_prompt
from router.scenario.fabric_client import (
    RETRY_WAIT_S,
    AgentAnswer,
    AgentCopy,
    AskAgainError,
    Question,
    RequestedCall,
    TurnFigures,
    read_arguments,
    run_operations,
    temporary_error,
)
from router.services import Services
from router.turns.answer import AnswerParts
from router.turns.open_turn import OpenTurn

RETRYABLE_STATUSES: Final = frozenset(
    {HTTPStatus.CONFLICT, HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.TOO_MANY_REQUESTS,
     HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)  # fmt: skip
FINAL_CODES: Final = frozenset({"operation_undone", "agents_in_use"})  # conflicts that do not pass


@dataclass(frozen=True, slots=True)
class InProcessClient:
    """Client that acts for one tenant, by the services of the chat and agent routes."""

    services: Services
    turn_services: TurnServices
    tenant: TenantId
    model: str

    async def ask(self, question: Question) -> AgentAnswer:
        """Return an agent's answer."""
        began_s = self._now_s()
        size_bytes = weigh([list(question.messages), list(question.tools)])
        with _retryable_errors():
            build = partial(turn_request, question, self.model)
            request = await run_sized(self.tenant, size_bytes, build)
            _, turn = await turn_of(self.turn_services, self.tenant, request)
            opened = await self.turn_services.turns.open(turn)
        try:
            return await self._answer(opened, began_s)
        except FabricError as error:  # it broke off
            raise AskAgainError(error.message, _wait_s(error)) from None
        finally:
            await opened.close()

    async def _answer(self, opened: OpenTurn, began_s: float) -> AgentAnswer:
        first_s, parts = None, AnswerParts()
        async with aclosing(opened.parts()) as events:
            async for event in events:
                has_output = isinstance(event, ToolCallPart | ToolCalls) or (
                    isinstance(event, Delta) and event.text
                )
                if has_output and first_s is None:
                    first_s = self._now_s()
                parts.add(event)
        whole, ended_s = parts.whole(), self._now_s()
        calls = tuple(
            RequestedCall(call.name, read_arguments(call.arguments), call.id)
            for call in whole.calls
            if not call.is_broken
        )
        figures = _figures(
            opened.admitted,
            whole.finished.completion_tokens,
            (first_s or ended_s) - began_s,
            ended_s - began_s,
        )
        return AgentAnswer(whole.text, calls, figures)

    async def fork(
        self, source: AgentId, copy: AgentId, to: str | None, op: OperationId
    ) -> AgentCopy:
        """Create an agent with the memory of another."""
        async with self._owner(source):
            receipt = await self.services.forks.fork((self.tenant, source), copy, to, op)
        return AgentCopy(receipt.target, receipt.bytes_sent)

    async def direct(
        self, agent: AgentId, items: Sequence[Mapping[str, Any]], op: OperationId
    ) -> None:
        """Add directives to an agent's memory."""
        now_s = self.services.fleet.clock.wall_s()
        async with self._owner(agent):
            directives = DIRECTIVES.read(list(items), "directives")
            added, spans = place_directives(directives, DirectiveOrigin(op, now_s, self.tenant))
            call = DirectAgent(self.tenant, agent, added=added, spans=spans, now_s=now_s)
            try:
                require_held(await self.services.propagation.apply(call), op)
            except NotFoundError:
                message = f"no node has {agent}"
                raise AskAgainError(message, RETRY_WAIT_S) from None

    async def run_edits(self, agent: AgentId) -> frozenset[OperationId] | None:
        """Return the operations of runs among an agent's directives; None if no node has it."""
        key, fleet = (self.tenant, agent), self.services.fleet
        async with self._owner(agent):
            try:
                owner = await fleet.reread_owner(key)
                view = await fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
            except NotFoundError:
                return None
        return frozenset(run_operations(each.operation for each in view.directives))

    async def undo_edits(self, agent: AgentId) -> bool:
        """Undo the directives of runs; return whether the agent had any."""
        removed = tuple(await self.run_edits(agent) or ())
        if not removed:
            return False
        now_s = self.services.fleet.clock.wall_s()
        call = DirectAgent(self.tenant, agent, removed=removed, now_s=now_s)
        async with self._owner(agent):
            with suppress(NotFoundError):
                await self.services.propagation.apply(call)
        return True

    async def move(self, agent: AgentId, to: str) -> AgentCopy:
        """Move an agent to a node."""
        async with self._owner(agent):
            receipt = await self.services.moves.migrate(self.tenant, agent, to)
        return AgentCopy(receipt.target, receipt.bytes_sent)

    async def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that accept agents."""
        await self.services.fleet.discovery.wait_for_roster()
        return tuple(view.name for view in self.services.fleet.ready())

    async def owners(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return the nodes that own agents; agents without an owner are left out."""
        fleet = self.services.fleet
        await self._meet()
        await fleet.membership.refresh(relist=True)
        owners = {agent: fleet.directory.owner((self.tenant, agent)) for agent in agents}
        return {agent: str(owner.node) for agent, owner in owners.items() if owner is not None}

    async def prefetch(self, agent: AgentId) -> None:
        """Load an agent's memory for its next turn."""
        async with self._owner(agent):
            await self.services.prefetches.load((self.tenant, agent))

    async def erase(self, agent: AgentId) -> None:
        """Erase an agent and its memory, if it exists."""
        await self._meet()
        with _retryable_errors():
            try:
                await self.services.erasures.erase(self.tenant, agent)
            except NotFoundError:
                return

    @asynccontextmanager
    async def _owner(self, agent: AgentId) -> AsyncIterator[None]:
        """Run a block that calls an agent's owner, with the lost-owner handling of routes."""
        await self._meet()
        with _retryable_errors():
            async with self.services.lost_owners.calling_owner((self.tenant, agent)):
                yield

    async def _meet(self) -> None:
        await self.services.fleet.discovery.wait_for_reports()

    def _now_s(self) -> float:
        return self.services.fleet.clock.monotonic_s()


@dataclass(frozen=True, slots=True)
class InProcessHost:
    """Host of runs in the router's own process."""

    settings: RouterSettings
    services: Services
    turn_services: TurnServices

    @property
    def clock(self) -> Clock:
        return self.services.fleet.clock

    async def model(self, name: str | None) -> str:
        """Return the resolved model name, by default the first that is served."""
        discovery = self.services.fleet.discovery
        if name is None:
            served = await discovery.models()
            if not served:
                message = "no node is ready yet"
                raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
            return served[0]
        resolved = await self.turn_services.names.resolve(name)
        await discovery.require_model(resolved)
        return resolved

    def client(self, tenant: TenantId, model: str) -> InProcessClient:
        return InProcessClient(self.services, self.turn_services, tenant, model)

    def is_known(self, tenant: TenantId) -> bool:
        """Return whether the settings still admit this tenant."""
        keyless = self.settings.loopback_without_key and tenant == DEFAULT_TENANT
        return keyless or tenant in self.settings.api_keys


def turn_request(question: Question, model: str) -> ApiRequest:
    """Return the request that a chat route would parse from the same messages."""
    if len(question.messages) > MESSAGES_MAX:
        message = f"the prompt of {question.agent} has more than {MESSAGES_MAX:,} messages"
        raise RejectedError(message)
    options = question.options
    max_tokens = COMPLETION_TOKENS_MAX if options.max_tokens is None else options.max_tokens
    return ApiRequest(
        model=model,
        identity=Identity(IdentityKind.AGENT, question.agent),
        prompt=chat_prompt(question.messages, [dict(tool) for tool in question.tools] or None),
        sampling=Sampling(max_tokens, **chosen_or_built_in(options)),
        left_out=left_out_fields(options),
        stream=True,
        priority=Priority.INTERACTIVE,
        prefetch=(),
        edits=EditOptions(None if options.edits is None else EDIT_MODES[options.edits.value]),
    )


def _figures(
    admitted: Admitted, completion_tokens: int, ttft_s: float, total_s: float
) -> TurnFigures:
    return TurnFigures(
        admitted.prompt_tokens,
        admitted.cached_tokens,
        completion_tokens,
        ttft_s,
        total_s,
        admitted.node,
        admitted.cache.value,
    )


@contextmanager
def _retryable_errors() -> Iterator[None]:
    """Raise AskAgainError for temporary errors, after which the call may be retried."""
    try:
        yield
    except FabricError as error:
        if status_of(error) not in RETRYABLE_STATUSES or error.code in FINAL_CODES:
            raise
        raise temporary_error(error.message, _wait_s(error), error.code) from None


def _wait_s(error: FabricError) -> float:
    return error.retry_after_s if isinstance(error, RetryLaterError) else RETRY_WAIT_S
