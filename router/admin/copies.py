"""POST fork, replicate and prefetch: copies of an agent, and its KV cache where it is wanted."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.ids import parse_agent_id, parse_operation_id
from router.admin.views.moves import fork_row, prefetch_row, replica_row
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key
from router.http.fields import Fields, require_text
from router.http.json_body import read_object
from router.moves.forks import Forks
from router.moves.prefetches import PrefetchRequests
from router.moves.replicas import Replicas


class CopiesApi:
    """Verbs that never change the agent they are about."""

    def __init__(self, forks: Forks, replicas: Replicas, prefetches: PrefetchRequests) -> None:
        self._forks = forks
        self._replicas = replicas
        self._prefetches = prefetches

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents/{agent}/fork", self.fork, methods=["POST"]),
            Route("/v1/agents/{agent}/replicate", self.replicate, methods=["POST"]),
            Route("/v1/agents/{agent}/prefetch", self.prefetch, methods=["POST"]),
            Route("/v1/agents/{agent}/prefetch", self.cancel, methods=["DELETE"]),
        ]

    async def fork(self, request: Request) -> Response:
        """Make the agent named by `as`, with this one's context; answers when it is durable."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("as", "to", "operation")
        name = parse_agent_id(require_text(fields.require("as"), "as"))
        operation = fields.text("operation")
        receipt = await self._forks.fork(
            key,
            name,
            fields.text("to"),
            fresh_operation() if operation is None else parse_operation_id(operation),
        )
        return JSONResponse(fork_row(name, key[1], receipt))

    async def replicate(self, request: Request) -> Response:
        """Copy the agent to the node named by `to`; with `keep` (default), after each turn, too."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("to", "keep")
        target = require_text(fields.require("to"), "to")
        keep = True if fields.raw("keep") is None else fields.flag("keep")
        receipt = await self._replicas.replicate(key, target, kept=keep)
        return JSONResponse(replica_row(receipt))

    async def prefetch(self, request: Request) -> Response:
        """Bring the agent into memory where it lives, or a copy of it to the node `to`."""
        key = agent_key(request)
        fields = Fields(await read_object(request, may_be_absent=True))
        fields.allow_only("to")
        target = fields.text("to")
        if target is not None and not await self._prefetches.is_home(key, target):
            return JSONResponse(replica_row(await self._prefetches.copy_to(key, target)))
        return JSONResponse(prefetch_row(await self._prefetches.load(key)))

    async def cancel(self, request: Request) -> Response:
        """End a load under way; nothing to do is no error."""
        return JSONResponse(prefetch_row(await self._prefetches.cancel(agent_key(request))))
