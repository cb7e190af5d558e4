"""What is said of an agent as a whole: decay, close, share and evict; and supersede, of a part."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.directive_calls import ChangeSettings, DirectAgent, MemoryView, ReadMemory
from fabric.control.node_calls import AgentView, Done, DropResident
from fabric.control.replica_calls import DropReplica
from fabric.errors import ConflictError
from fabric.ids import AgentKey, NodeName, parse_operation_id
from fabric.limits import DECAY_S_MAX
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from router.admin.directive_fields import Made, parse_directives, require_held
from router.admin.views.directives import directives_row, wishes_row
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key, caller_of
from router.http.fields import Fields, refuse
from router.http.json_body import read_object
from router.moves.prefix_seeding import revoke_shared_prefixes
from router.moves.propagate import SettingsPropagation

_SCOPES = ("tenant", "agent")
_TIERS = ("memory", "disk")


class AgentWishesApi:
    """Verbs that say what an agent's memory is worth, and to whom."""

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
        """Let an agent be evicted before others once it has been idle for `after_s`."""
        key = agent_key(request)
        fields = Fields(await read_object(request, may_be_absent=True))
        fields.allow_only("after_s")
        after_s = fields.number("after_s", 0, DECAY_S_MAX) or 0.0
        return await self._wish(ChangeSettings(*key, decays=True, decays_after_s=after_s))

    async def last(self, request: Request) -> Response:
        """Let an agent be worth again what it was."""
        return await self._wish(ChangeSettings(*agent_key(request), decays=False))

    async def close(self, request: Request) -> Response:
        """Let go of an agent's hot memory and its pin, and evict it first, until its next turn."""
        return await self._wish(ChangeSettings(*agent_key(request), closes=True))

    async def share(self, request: Request) -> Response:
        """Say whether other agents of the tenant may begin with this one's memory."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("scope")
        scope = fields.require("scope")
        if scope not in _SCOPES:
            refuse("scope", "expected one of " + ", ".join(_SCOPES))
        is_private = scope == "agent"
        answer = await self._wish(ChangeSettings(*key, is_private=is_private))
        if is_private:  # before the answer: from then on nobody begins with it
            await revoke_shared_prefixes(self._fleet, key)
        return answer

    async def evict(self, request: Request) -> Response:
        """Let go of an agent's memory, or of a copy of it on another node's disk."""
        key = agent_key(request)
        fields = Fields(await read_object(request, may_be_absent=True))
        fields.allow_only("from", "node")
        tier = fields.text("from") or "memory"
        if tier not in _TIERS:
            refuse("from", "expected one of " + ", ".join(_TIERS))
        if tier == "disk":
            fields.require("node")
            return JSONResponse(wishes_row(await self._drop(key, fields.text("node") or "")))
        return JSONResponse(wishes_row(await self._fleet.ask_owner(DropResident(*key))))

    async def supersede(self, request: Request) -> Response:
        """Let an earlier message give way to a word that names the later one."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("earlier", "later", "mode", "operation")
        earlier, later = fields.object("earlier") or {}, fields.object("later") or {}
        for name in ("earlier", "later"):
            fields.require(name)
        items = [_superseded(earlier, later, fields.text("mode"))]
        named = fields.text("operation")
        operation = fresh_operation() if named is None else parse_operation_id(named)
        made = Made(operation, self._clock.wall_s(), caller_of(request).owner)
        added, spans = parse_directives(items, made)
        call = DirectAgent(*key, added=added, spans=spans, now_s=made.made_s)
        view = require_held(await self._propagation.apply(call), operation)
        return JSONResponse(directives_row(view, operation))

    async def _wish(self, call: ChangeSettings) -> Response:
        return JSONResponse(wishes_row(await self._propagation.apply(call)))

    async def _drop(self, key: AgentKey, node: str) -> AgentView:
        """Drop a copy while the owner answers and has all of it on disk; describe that.

        Raises NodeLostError where the owner does not answer: the copy may be all that is left.
        """
        owner = await self._fleet.fresh_owner(key)
        held = {holding.node: holding for holding in self._fleet.directory.living(key)}
        copy = held.get(NodeName(node))
        if copy is None:
            refuse("node", "it has no copy of this agent")
        view = owner.view
        is_safe = view is not None and view.durable and owner.node != copy.node
        if view is None or copy.state is not OwnerState.REPLICA or not is_safe:
            message = f"what {copy.node} has of this agent may be all there is"
            raise ConflictError(message, code="only_copy")
        await self._fleet.link(owner.node).call(ReadMemory(*key), MemoryView)
        await self._fleet.link(copy.node).call(DropReplica(*key), Done)
        return view


def _superseded(earlier: dict[str, Any], later: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """Spell the directive; only calls and numbers name one message and no other."""
    name, _ = _name("later", later), _name("earlier", earlier)
    first, second = earlier.get("message"), later.get("message")
    if first is not None and second is not None and first >= second:
        refuse("later.message", "it does not come after the earlier one")
    made: dict[str, Any] = {"replacement": f"[superseded by {name}]", "mode": mode}
    return made | {each: earlier.get(each) for each in ("tool_call_id", "message")}


def _name(param: str, place: dict[str, Any]) -> str:
    fields = Fields(place, f"{param}.")
    fields.allow_only("tool_call_id", "message")
    call, number = fields.text("tool_call_id", 256), fields.raw("message")
    if (call is None) == (number is None) or isinstance(number, (bool, float, dict, list, str)):
        refuse(param, "name either a tool_call_id or the number of a message")
    return f"message {number}" if call is None else f"the result of {call}"
