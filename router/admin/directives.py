"""Routes of directives: lasting edits of an agent's history, and the return to an exact cache."""

from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.directive_calls import ChangeSettings, DirectAgent, MemoryView, ReadMemory
from fabric.control.node_calls import AgentView
from fabric.ids import OperationId, parse_operation_id
from fabric.ports import Clock
from router.admin.directive_fields import (
    DIRECTIVES,
    DirectiveBody,
    DirectiveOrigin,
    place_directives,
    require_held,
)
from router.admin.views.agents import AGENT_DIRECTIVES, MEMORY, rebuild_row
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key, caller_of
from router.http.json_body import read_body
from router.http.schema import OPERATION_ID, ObjectOf, optional, required
from router.moves.propagate import SettingsPropagation


@dataclass(frozen=True, slots=True, kw_only=True)
class AddDirectivesBody:
    """Body of POST /v1/agents/{agent}/directives."""

    directives: list[DirectiveBody] = required(DIRECTIVES)
    operation: OperationId | None = optional(OPERATION_ID)


ADD_DIRECTIVES_BODY: Final = ObjectOf(AddDirectivesBody, is_strict=True)


class DirectivesApi:
    """Edits that last until they are removed."""

    def __init__(self, fleet: Fleet, propagation: SettingsPropagation, clock: Clock) -> None:
        self._fleet = fleet
        self._propagation = propagation
        self._clock = clock

    def routes(self) -> list[Route]:
        path = "/v1/agents/{agent}/directives"
        return [
            Route(path, self.show, methods=["GET"]),
            Route(path, self.add, methods=["POST"]),
            Route(path, self.remove_all, methods=["DELETE"]),
            Route(f"{path}/{{operation}}", self.remove, methods=["DELETE"]),
            Route("/v1/agents/{agent}/rebuild", self.rebuild, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """List the messages that directives can name, and the active and undone directives."""
        key = agent_key(request)
        owner = await self._fleet.reread_owner(key)
        view = await self._fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
        return JSONResponse(MEMORY.row(view, id=key[1], node=owner.node))

    async def add(self, request: Request) -> Response:
        """Add directives, all or none; 409 for an operation that was undone."""
        key = agent_key(request)
        body = await read_body(request, ADD_DIRECTIVES_BODY)
        operation = body.operation or fresh_operation()
        origin = DirectiveOrigin(operation, self._clock.wall_s(), caller_of(request).owner)
        added, spans = place_directives(body.directives, origin)
        call = DirectAgent(*key, added=added, spans=spans)
        view = require_held(await self._send(call), operation)
        return JSONResponse(AGENT_DIRECTIVES.row(view, operation=operation))

    async def remove(self, request: Request) -> Response:
        """Remove the directives of one operation, if there are any."""
        key = agent_key(request)
        operation = parse_operation_id(request.path_params["operation"])
        return await self._change(DirectAgent(*key, removed=(operation,)), operation)

    async def remove_all(self, request: Request) -> Response:
        """Remove all directives of an agent."""
        key = agent_key(request)
        return await self._change(DirectAgent(*key, removes_all=True), None)

    async def rebuild(self, request: Request) -> Response:
        """Make an agent's next turn recompute what was kept after edits."""
        key = agent_key(request)
        call = ChangeSettings(*key, rebuilds=True)
        return JSONResponse(rebuild_row(await self._propagation.apply(call)))

    async def _change(self, call: DirectAgent, operation: OperationId | None) -> Response:
        return JSONResponse(AGENT_DIRECTIVES.row(await self._send(call), operation=operation))

    async def _send(self, call: DirectAgent) -> AgentView:
        return await self._propagation.apply(replace(call, now_s=self._clock.wall_s()))
