"""Routes that fork, replicate and prefetch an agent."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.node_calls import AgentView
from fabric.ids import AgentId, OperationId
from router.admin.views.moves import FORK, PREFETCH, REPLICA
from router.admin.views.shape import Row
from router.fresh_ids import fresh_operation
from router.http.auth import agent_key
from router.http.json_body import read_body
from router.http.schema import (
    AGENT_ID,
    OPERATION_ID,
    Flag,
    ObjectOf,
    Text,
    only,
    optional,
    required,
)
from router.moves.forks import Forks
from router.moves.prefetches import PrefetchRequests
from router.moves.replicas import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkBody:
    """Body of POST /v1/agents/{agent}/fork."""

    name: AgentId = required(AGENT_ID, "as")
    to: str | None = optional(Text())
    operation: OperationId | None = optional(OPERATION_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateBody:
    """Body of POST /v1/agents/{agent}/replicate."""

    to: str = required(Text())
    keep: bool = optional(Flag(), True)


FORK_BODY: Final = ObjectOf(ForkBody, is_strict=True)
REPLICATE_BODY: Final = ObjectOf(ReplicateBody, is_strict=True)
PREFETCH_BODY: Final = only("to", Text(), None, is_strict=True)


class CopiesApi:
    """Routes that copy an agent or load its cache, and never change it."""

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
        """Create the agent `as` with this one's context; answer once it is durable."""
        key = agent_key(request)
        body = await read_body(request, FORK_BODY)
        operation = body.operation or fresh_operation()
        receipt = await self._forks.fork(key, body.name, body.to, operation)
        return JSONResponse(FORK.row(receipt, id=body.name, forked_from=key[1]))

    async def replicate(self, request: Request) -> Response:
        """Copy the agent to the node `to`; with `keep` (default), repeat it after every turn."""
        key = agent_key(request)
        body = await read_body(request, REPLICATE_BODY)
        receipt = await self._replicas.replicate(key, body.to, kept=body.keep)
        return JSONResponse(REPLICA.row(receipt))

    async def prefetch(self, request: Request) -> Response:
        """Load the agent's cache into RAM on its node, or copy it to the node `to`."""
        key = agent_key(request)
        target = await read_body(request, PREFETCH_BODY, may_be_absent=True)
        if target is not None and not await self._prefetches.is_home(key, target):
            return JSONResponse(REPLICA.row(await self._prefetches.copy_to(key, target)))
        return JSONResponse(_prefetch_row(await self._prefetches.load(key)))

    async def cancel(self, request: Request) -> Response:
        """Cancel a load; without one, do nothing."""
        return JSONResponse(_prefetch_row(await self._prefetches.cancel(agent_key(request))))


def _prefetch_row(view: AgentView) -> Row:
    return PREFETCH.row(view, tiers=view.tiers)
