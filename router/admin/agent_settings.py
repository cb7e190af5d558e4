"""Settings of a whole agent (decay, close, share), its eviction, and superseded messages."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.directive_calls import (
    ChangeSettings,
    DirectAgent,
    MemoryView,
    ReadMemory,
)
from fabric.control.node_calls import AgentView, Done, DropResident
from fabric.control.replica_calls import DropReplica
from fabric.edit_mode import EditMode
from fabric.errors import ConflictError
from fabric.ids import AgentKey, NodeName, OperationId
from fabric.limits import DECAY_S_MAX
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from router.admin.directive_fields import (
    CALL_ID,
    DIRECTIVE_MODE,
    MESSAGE_NUMBER,
    DirectiveBody,
    DirectiveOrigin,
    place_directives,
    require_held,
)
from router.admin.views.agents import AGENT_DIRECTIVES, agent_settings_row
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key, caller_of
from router.http.json_body import read_body
from router.http.refusals import refuse
from router.http.schema import (
    OPERATION_ID,
    Number,
    ObjectOf,
    Text,
    WordIn,
    only,
    optional,
    refuse_missing,
    required,
    words,
)
from router.moves.prefix_seeding import revoke_shared_prefixes
from router.moves.propagate import SettingsPropagation

_MEMORY, _DISK = "memory", "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictBody:
    """Body of POST /v1/agents/{agent}/evict."""

    tier: str = optional(words(_MEMORY, _DISK), _MEMORY, "from")
    node: str | None = optional(Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedMessage:
    """Message by its number, or the result of a call; either names one message."""

    tool_call_id: str | None = optional(CALL_ID)
    message: int | None = optional(MESSAGE_NUMBER)

    def __str__(self) -> str:
        if self.tool_call_id is None:
            return f"message {self.message}"
        return f"the result of {self.tool_call_id}"


_MESSAGE: Final = ObjectOf(
    _NamedMessage,
    is_strict=True,
    one_of=(("tool_call_id",), ("message",)),
    hint="name either a tool_call_id or the number of a message",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersedeBody:
    """Body of POST /v1/agents/{agent}/supersede."""

    earlier: _NamedMessage = required(_MESSAGE)
    later: _NamedMessage = required(_MESSAGE)
    mode: EditMode = optional(DIRECTIVE_MODE, EditMode.FORGET)
    operation: OperationId | None = optional(OPERATION_ID)

    def directive(self) -> DirectiveBody:
        """Return the directive that replaces the earlier message by the later one's name."""
        first, second = self.earlier.message, self.later.message
        if first is not None and second is not None and first >= second:
            refuse("later.message", "it does not come after the earlier one")
        return DirectiveBody(
            tool_call_id=self.earlier.tool_call_id,
            message=first,
            replacement=f"[superseded by {self.later}]",
            mode=self.mode,
            param="earlier",
        )


DECAY_BODY: Final = only("after_s", Number(0.0, DECAY_S_MAX), 0.0, is_strict=True)
_IS_PRIVATE: Final = WordIn({"tenant": False, "agent": True})
SHARE_BODY: Final = only("scope", _IS_PRIVATE, is_strict=True)
EVICT_BODY: Final = ObjectOf(EvictBody, is_strict=True)
SUPERSEDE_BODY: Final = ObjectOf(SupersedeBody, is_strict=True)


class AgentSettingsApi:
    """Routes that set the retention of an agent's cache, and which agents may reuse it."""

    def __init__(self, fleet: Fleet, propagation: SettingsPropagation, clock: Clock) -> None:
        self._fleet = fleet
        self._propagation = propagation
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents/{agent}/decay", self.decay, methods=["POST"]),
            Route("/v1/agents/{agent}/decay", self.last, methods=["DELETE"]),
            Route("/v1/agents/{agent}/close", self.close, methods=["POST"]),
            Route("/v1/agents/{agent}/share", self.share, methods=["POST"]),
            Route("/v1/agents/{agent}/evict", self.evict, methods=["POST"]),
            Route("/v1/agents/{agent}/supersede", self.supersede, methods=["POST"]),
        ]

    async def decay(self, request: Request) -> Response:
        """Evict the agent before others once it has been idle for `after_s`."""
        key = agent_key(request)
        after_s = await read_body(request, DECAY_BODY, may_be_absent=True)
        return await self._set(ChangeSettings(*key, decays=True, decays_after_s=after_s))

    async def last(self, request: Request) -> Response:
        """Undo a decay."""
        return await self._set(ChangeSettings(*agent_key(request), decays=False))

    async def close(self, request: Request) -> Response:
        """Drop an agent's hot cache and pin, and evict it first until its next turn."""
        return await self._set(ChangeSettings(*agent_key(request), closes=True))

    async def share(self, request: Request) -> Response:
        """Set whether other agents of the tenant may reuse this one's cache."""
        key = agent_key(request)
        is_private = await read_body(request, SHARE_BODY)
        answer = await self._set(ChangeSettings(*key, is_private=is_private))
        if is_private:  # before the answer: afterwards no agent reuses it
            await revoke_shared_prefixes(self._fleet, key)
        return answer

    async def evict(self, request: Request) -> Response:
        """Drop an agent's hot cache, or a copy of it on another node's disk."""
        key = agent_key(request)
        body = await read_body(request, EVICT_BODY, may_be_absent=True)
        if body.tier == _MEMORY:
            return JSONResponse(agent_settings_row(await self._fleet.ask_owner(DropResident(*key))))
        if body.node is None:
            refuse_missing("node")
        return JSONResponse(agent_settings_row(await self._drop(key, body.node)))

    async def supersede(self, request: Request) -> Response:
        """Replace an earlier message by a reference to the later one."""
        key = agent_key(request)
        body = await read_body(request, SUPERSEDE_BODY)
        operation = body.operation or fresh_operation()
        origin = DirectiveOrigin(operation, self._clock.wall_s(), caller_of(request).owner)
        added, spans = place_directives([body.directive()], origin)
        call = DirectAgent(*key, added=added, spans=spans, now_s=origin.made_s)
        view = require_held(await self._propagation.apply(call), operation)
        return JSONResponse(AGENT_DIRECTIVES.row(view, operation=operation))

    async def _set(self, call: ChangeSettings) -> Response:
        return JSONResponse(agent_settings_row(await self._propagation.apply(call)))

    async def _drop(self, key: AgentKey, node: str) -> AgentView:
        """Drop a copy if the owner answers and has all of it on disk; return the owner's view.

        Raise NodeLostError if the owner does not answer: the copy may be all that is left.
        """
        owner = await self._fleet.reread_owner(key)
        holdings = {
            holding.node: holding for holding in self._fleet.directory.unerased_holdings(key)
        }
        copy = holdings.get(NodeName(node))
        if copy is None:
            refuse("node", "it has no copy of this agent")
        view = owner.view
        is_safe = view is not None and view.durable and owner.node != copy.node
        if view is None or copy.state is not OwnerState.REPLICA or not is_safe:
            message = f"the copy on {copy.node} may be the only one of this agent"
            raise ConflictError(message, code="only_copy")
        await self._fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
        await self._fleet.link(copy.node).call(DropReplica(*key), Done)
        return view
