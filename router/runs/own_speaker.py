"""The router's own turns as a run's speaker.

In this process, and not over loopback: a run that goes on behind a restart has no request whose key
it could send, and the router keeps digests of keys only. So it holds the tenant that it was asked
by, and each question goes the way of a chat from its parsing on: the same checks, policies, bounds
of answers, placement, and admission by nodes as this tenant's. What bounds requests before that
(bodies, connections) has a bound of its own here: runs at once, and agents of a run at once.
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
from fabric.ids import AgentId, OperationId, TenantId
from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
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
from router.admin.directive_fields import Made, parse_directives, require_held
from router.api.adapter import Asked
from router.api.edit_fields import WantedEdits
from router.api.turn_route import Desk, turn_of
from router.http.errors import status_of
from router.large_work import run_sized, weigh
from router.prompt import chat_prompt
from router.scenario.speaker import (
    WAIT_S,
    AgentCopy,
    AskAgainError,
    Question,
    SpokenAnswer,
    TurnFigures,
    WantedCall,
    edits_of_runs,
    later_error,
    read_arguments,
)
from router.services import Services
from router.turns.answer import AnswerParts
from router.turns.open_turn import OpenTurn

_TEMPERATURE: Final = 1.0  # of agents that set none, as in the chat API
RETRYABLE_STATUSES: Final = frozenset(
    {HTTPStatus.CONFLICT, HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.TOO_MANY_REQUESTS,
     HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)  # fmt: skip
FINAL_CODES: Final = frozenset({"operation_undone", "agents_in_use"})  # conflicts that do not pass


@dataclass(frozen=True, slots=True)
class OwnSpeaker:
    """Asks as one tenant, with what the routes of chats and agents ask with."""

    services: Services
    desk: Desk
    tenant: TenantId
    model: str

    async def ask(self, question: Question) -> SpokenAnswer:
        """Return an agent's answer."""
        began_s = self._now_s()
        size_bytes = weigh([list(question.messages), list(question.tools)])
        with _repeatable():
            build = partial(turn_request, question, self.model)
            asked = await run_sized(self.tenant, size_bytes, build)
            _, turn = await turn_of(self.desk, self.tenant, asked)
            opened = await self.desk.turns.open(turn)
        try:
            return await self._answer(opened, began_s)
        except FabricError as error:  # it broke off
            raise AskAgainError(error.message, _wait_s(error)) from None
        finally:
            await opened.close()

    async def _answer(self, opened: OpenTurn, began_s: float) -> SpokenAnswer:
        first_s, parts = None, AnswerParts()
        async with aclosing(opened.parts()) as events:
            async for event in events:
                says = isinstance(event, ToolCallPart | ToolCalls) or (
                    isinstance(event, Delta) and event.text
                )
                if says and first_s is None:
                    first_s = self._now_s()
                parts.add(event)
        whole, ended_s = parts.whole(), self._now_s()
        calls = tuple(WantedCall(c.name, read_arguments(c.arguments), c.id) for c in whole.calls)
        figures = _figures(
            opened.admitted,
            whole.finished.completion_tokens,
            (first_s or ended_s) - began_s,
            ended_s - began_s,
        )
        return SpokenAnswer(whole.text, calls, figures)

    async def fork(
        self, source: AgentId, copy: AgentId, to: str | None, op: OperationId
    ) -> AgentCopy:
        """Make an agent that begins with the memory of another."""
        async with self._owner(source):
            receipt = await self.services.forks.fork((self.tenant, source), copy, to, op)
        return AgentCopy(receipt.target, receipt.bytes_sent)

    async def direct(
        self, agent: AgentId, items: Sequence[Mapping[str, Any]], op: OperationId
    ) -> None:
        """Edit an agent's memory from now on."""
        now_s = self.services.fleet.clock.wall_s()
        async with self._owner(agent):
            added, spans = parse_directives(list(items), Made(op, now_s, self.tenant))
            call = DirectAgent(self.tenant, agent, added=added, spans=spans, now_s=now_s)
            try:
                require_held(await self.services.propagation.apply(call), op)
            except NotFoundError:
                message = f"no node has {agent}"
                raise AskAgainError(message, WAIT_S) from None

    async def edits(self, agent: AgentId) -> frozenset[OperationId] | None:
        """Return the operations of runs whose edits an agent holds; None where no node has it."""
        key, fleet = (self.tenant, agent), self.services.fleet
        async with self._owner(agent):
            try:
                owner = await fleet.fresh_owner(key)
                view = await fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
            except NotFoundError:
                return None
        return frozenset(edits_of_runs(each.operation for each in view.directives))

    async def take_back(self, agent: AgentId) -> bool:
        """Undo what runs have edited of an agent's memory; say whether there was anything."""
        removed = tuple(await self.edits(agent) or ())
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
        """Name the nodes that take agents."""
        await self.services.fleet.discovery.wait_for_roster()
        return tuple(view.name for view in self.services.fleet.ready())

    async def owners(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return the nodes where agents are now; those that are nowhere are left out."""
        fleet = self.services.fleet
        await self._meet()
        await fleet.membership.refresh(relist=True)
        found = {agent: fleet.directory.owner((self.tenant, agent)) for agent in agents}
        return {agent: str(owner.node) for agent, owner in found.items() if owner is not None}

    async def prefetch(self, agent: AgentId) -> None:
        """Bring an agent's memory where its next turn finds it at once."""
        async with self._owner(agent):
            await self.services.prefetches.load((self.tenant, agent))

    async def erase(self, agent: AgentId) -> None:
        """Remove an agent and its memory; one that nobody knows is gone already."""
        await self._meet()
        with _repeatable():
            try:
                await self.services.erasures.erase(self.tenant, agent)
            except NotFoundError:
                return

    @asynccontextmanager
    async def _owner(self, agent: AgentId) -> AsyncIterator[None]:
        """Run a block that asks an agent's owner, as the routes that name an agent do."""
        await self._meet()
        with _repeatable():
            async with self.services.lost_owners.served((self.tenant, agent)):
                yield

    async def _meet(self) -> None:
        await self.services.fleet.discovery.wait_for_reports()

    def _now_s(self) -> float:
        return self.services.fleet.clock.monotonic_s()


def turn_request(question: Question, model: str) -> Asked:
    """Return the checked request that a chat route would parse from a question's text."""
    if len(question.messages) > MESSAGES_MAX:
        message = f"the prompt of {question.agent} has more than {MESSAGES_MAX:,} messages"
        raise RejectedError(message)
    options = question.options
    max_tokens = COMPLETION_TOKENS_MAX if options.max_tokens is None else options.max_tokens
    temperature = _TEMPERATURE if options.temperature is None else options.temperature
    return Asked(
        model=model,
        identity=Identity(IdentityKind.AGENT, question.agent),
        prompt=chat_prompt(question.messages, [dict(tool) for tool in question.tools] or None),
        sampling=Sampling(max_tokens, temperature),
        stream=True,
        priority=Priority.INTERACTIVE,
        prefetch=(),
        edits=WantedEdits(None if options.edits is None else EDIT_MODES[options.edits.value]),
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
def _repeatable() -> Iterator[None]:
    """Tell a run what the same call may do later."""
    try:
        yield
    except FabricError as error:
        if status_of(error) not in RETRYABLE_STATUSES or error.code in FINAL_CODES:
            raise
        raise later_error(error.message, _wait_s(error), error.code) from None


def _wait_s(error: FabricError) -> float:
    return error.retry_after_s if isinstance(error, RetryLaterError) else WAIT_S
