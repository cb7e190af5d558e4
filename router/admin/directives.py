"""Directives: what reads otherwise in an agent's history from now on, and exact memory again."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.directive_calls import ChangeSettings, DirectAgent, MemoryView, ReadMemory
from fabric.control.node_calls import AgentView
from fabric.ids import AgentKey, OperationId, parse_operation_id
from fabric.limits import DIRECTIVES_MAX
from fabric.ports import Clock
from router.admin.directive_fields import Made, parse_directives, require_held
from router.admin.views.directives import directives_row, memory_row, rebuild_row
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key, caller_of
from router.http.fields import Fields, refuse
from router.http.json_body import read_object
from router.moves.propagate import SettingsPropagation


class DirectivesApi:
    """Edits that hold until they are taken back."""

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
        """List the messages that can be named, the directives that hold, and those undone."""
        key = agent_key(request)
        owner = await self._fleet.fresh_owner(key)
        view = await self._fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
        return JSONResponse(memory_row(key[1], owner.node, view))

    async def add(self, request: Request) -> Response:
        """Add directives, all or none; 409 for an operation that was undone."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("directives", "operation")
        named = fields.text("operation")
        operation = fresh_operation() if named is None else parse_operation_id(named)
        items = fields.items("directives", DIRECTIVES_MAX)
        if not items:
            refuse("directives", "expected a list with at least one directive")
        made = Made(operation, self._clock.wall_s(), caller_of(request).owner)
        added, spans = parse_directives(items, made)
        call = DirectAgent(*key, added=added, spans=spans)
        view = require_held(await self._send(call), operation)
        return JSONResponse(directives_row(view, operation))

    async def remove(self, request: Request) -> Response:
        """Take back what one operation said; what is no directive is no error."""
        key = agent_key(request)
        operation = parse_operation_id(request.path_params["operation"])
        return await self._change(key, DirectAgent(*key, removed=(operation,)), operation)

    async def remove_all(self, request: Request) -> Response:
        """Take back all directives of an agent."""
        key = agent_key(request)
        return await self._change(key, DirectAgent(*key, removes_all=True), None)

    async def rebuild(self, request: Request) -> Response:
        """Let an agent's next turn compute anew what was kept behind edits."""
        key = agent_key(request)
        call = ChangeSettings(*key, rebuilds=True)
        return JSONResponse(rebuild_row(await self._propagation.apply(call)))

    async def _change(
        self, key: AgentKey, call: DirectAgent, operation: OperationId | None
    ) -> Response:
        return JSONResponse(directives_row(await self._send(call), operation))

    async def _send(self, call: DirectAgent) -> AgentView:
        return await self._propagation.apply(replace(call, now_s=self._clock.wall_s()))
