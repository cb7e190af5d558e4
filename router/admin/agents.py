"""Routes that list, show, erase, pin and migrate a tenant's own agents."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.node_calls import PinAgent
from fabric.ids import AgentId, AgentKey, TenantId
from router.admin.views.agents import PIN, AgentFilter, agent_row, erasure_row
from router.admin.views.moves import MIGRATION
from router.fleet.fleet import Fleet
from router.http.auth import (
    ALL_TENANTS,
    TENANT,
    agent_key,
    require_operator,
    shown_agent_key,
    shown_tenant,
)
from router.http.json_body import read_body
from router.http.paging import page_of, page_response
from router.http.refusals import query_flag
from router.http.schema import Flag, Text, only
from router.limits import AGENTS_PAGE_MAX
from router.moves.erasures import Erasures
from router.moves.move_registry import MoveRegistry

PIN_BODY: Final = only("pinned", Flag(), is_strict=True)
MIGRATE_BODY: Final = only("to", Text(), is_strict=True)


class QuotingRuns(Protocol):
    """Stored scenario runs, whose journals quote the agents that took part."""

    async def quoting(self, tenant: TenantId, agent: AgentId) -> Sequence[str]:
        """Return the names of the runs that quote an agent."""
        ...

    async def forget_quoting(self, tenant: TenantId, agent: AgentId) -> Sequence[str]:
        """Remove the ones that have ended; return their names."""
        ...


def _row_name(key: AgentKey, *, is_whole: bool) -> str:
    """Name an agent in a list; of all tenants, with its tenant."""
    return "/".join(key) if is_whole else key[1]


class AgentsApi:
    """Agents as their nodes describe them now."""

    def __init__(
        self, fleet: Fleet, moves: MoveRegistry, erasures: Erasures, runs: QuotingRuns
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._erasures = erasures
        self._runs = runs

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents", self.index, methods=["GET"]),
            Route("/v1/agents/{agent}", self.show, methods=["GET"]),
            Route("/v1/agents/{agent}", self.erase, methods=["DELETE"]),
            Route("/v1/agents/{agent}/migrate", self.migrate, methods=["POST"]),
            Route("/v1/agents/{agent}/pin", self.pin, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List a tenant's agents on all nodes that have reported theirs, a page at a time.

        Operators may list those of another tenant, or of all.
        """
        fleet, query = self._fleet, request.query_params
        page, agent_filter = page_of(query, AGENTS_PAGE_MAX), AgentFilter.of(query)
        keys = self._listed_keys(request)
        fleet.discovery.require_nodes()
        await fleet.membership.refresh(relist=True)
        if agent_filter.node is not None:
            fleet.require_node(agent_filter.node, param="node")
        is_whole = query.get(TENANT) == ALL_TENANTS
        matched_keys = [key for key in keys() if agent_filter.matches(fleet, key)]
        shown_keys, has_more = page.cut(matched_keys, lambda key: _row_name(key, is_whole=is_whole))
        agents = [agent_row(fleet, key) for key in shown_keys]
        if TENANT in query:
            agents = [row | {"tenant": key[0]} for row, key in zip(agents, shown_keys, strict=True)]
        last = _row_name(shown_keys[-1], is_whole=is_whole) if shown_keys else None
        unheard = list(fleet.membership.unreported_nodes())
        unmet = fleet.discovery.missing_count
        reach = {"complete": not unheard and not unmet, "unheard": unheard, "unmet": unmet}
        return JSONResponse(page_response(agents, last, has_more=has_more) | reach)

    def _listed_keys(self, request: Request) -> Callable[[], list[AgentKey]]:
        """Return the keys of the agents that the caller may see, by their names in the list."""
        directory = self._fleet.directory
        if request.query_params.get(TENANT) == ALL_TENANTS:
            require_operator(request)
            return lambda: sorted(directory.all_keys(), key="/".join)
        tenant = shown_tenant(request)
        return lambda: [(tenant, agent) for agent in directory.agents(tenant)]

    async def show(self, request: Request) -> Response:
        key = shown_agent_key(request)
        await self._fleet.membership.refresh(relist=True)
        if not self._fleet.directory.holdings(key):
            raise self._fleet.discovery.unknown_agent(key[1])
        return JSONResponse(agent_row(self._fleet, key))

    async def erase(self, request: Request) -> Response:
        """Erase an agent and, with `runs=true`, the ended runs that quote it."""
        key = agent_key(request)
        has_runs = query_flag(request.query_params, "runs")
        erasure = await self._erasures.erase(*key)
        removed = await self._runs.forget_quoting(*key) if has_runs else ()
        return JSONResponse(erasure_row(erasure, await self._runs.quoting(*key), removed))

    async def pin(self, request: Request) -> Response:
        """Evict an agent last or, with `pinned` false, like any other."""
        key = agent_key(request)
        pinned = await read_body(request, PIN_BODY)
        return JSONResponse(PIN.row(await self._fleet.ask_owner(PinAgent(*key, pinned))))

    async def migrate(self, request: Request) -> Response:
        """Move an agent to the node `to`; answer once the move is committed."""
        tenant, agent = agent_key(request)
        target = await read_body(request, MIGRATE_BODY)
        return JSONResponse(MIGRATION.row(await self._moves.migrate(tenant, agent, target)))
