"""Routes about the routers of a fabric: which one is active, promotion by hand, and restart."""

import os
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric import CONTROL_VERSION, CONTROL_VERSION_MIN
from fabric.errors import ConflictError
from fabric.hosting.installed_code import installed_code
from fabric.limits import STOP_WAIT_S_MAX
from router.admin.views.shape import Row
from router.fleet.fleet import Fleet
from router.fleet.term_keeper import TermKeeper
from router.fresh_ids import fresh_name
from router.http.auth import caller_of, require_operator, tenant_of
from router.http.json_body import read_body
from router.http.schema import Number, only
from router.restart import RestartRequest

SOLE, ACTIVE, STANDBY = ROLES = ("sole", "active", "standby")

# Of a router or a node: how long running turns may take to end.
RESTART_BODY: Final = only("wait_s", Number(0, STOP_WAIT_S_MAX), is_strict=True)


class RouterApi:
    """This router's role among the routers of its fabric."""

    def __init__(
        self, fleet: Fleet, terms: TermKeeper | None, restart: RestartRequest | None = None
    ) -> None:
        self._fleet = fleet
        self._terms = terms
        self._restart = restart
        self._process: Row = {"code": installed_code("router"), "pid": os.getpid()}
        self._process |= {"control": CONTROL_VERSION, "control_min": CONTROL_VERSION_MIN}
        self._process["process"] = fresh_name("")  # of this life: a restart keeps the pid

    def routes(self) -> list[Route]:
        return [
            Route("/v1/router", self.show, methods=["GET"]),
            Route("/v1/router/promote", self.promote, methods=["POST"]),
            Route("/v1/router/restart", self.restart, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Return this router's role, even if another router is active."""
        if caller_of(request).operator is None:
            tenant_of(request)  # raises for callers with neither key
            return JSONResponse(router_row(self._fleet, self._terms))
        return JSONResponse(router_row(self._fleet, self._terms) | self._process)

    async def promote(self, request: Request) -> Response:
        """Become the active router with the votes of those that answer."""
        require_operator(request)
        if self._terms is None:
            message = (
                "this fabric has one router: set router.standby to true for all of its routers"
            )
            raise ConflictError(message, code="no_standby")
        await self._terms.promote()
        return JSONResponse(router_row(self._fleet, self._terms))

    async def restart(self, request: Request) -> Response:
        """Restart this router's process, once its streams have ended or the wait is over."""
        require_operator(request)
        wait_s = await read_body(request, RESTART_BODY)
        if self._restart is None:
            message = "this router was not started by macfabric: restart it as you started it"
            raise ConflictError(message, code="cannot_restart")
        self._restart.ask(wait_s)
        return JSONResponse({"object": "router.restart", "wait_s": wait_s, **self._process}, 202)


def router_row(fleet: Fleet, terms: TermKeeper | None) -> Row:
    """Return a router's role, its term and its voters as a JSON row."""
    url = fleet.urls[0] if fleet.urls else ""
    row: Row = {"object": "router", "role": SOLE, "url": url, "active_url": url, "term": None}
    row |= {"voters": 0, "voters_answering": 0, "promoted": False, "problem": None}
    if terms is None:
        return row
    last_vote = terms.terms.last_vote
    return row | {
        "role": ACTIVE if terms.is_active else STANDBY,
        "active_url": url if terms.is_active else terms.active_url,
        "term": terms.held() if terms.is_active else terms.terms.highest.term,
        "voters": terms.terms.voters_count,
        "voters_answering": last_vote.answered_count if last_vote is not None else 0,
        "promoted": terms.is_active and terms.terms.is_forced,
        "problem": terms.problem,
    }
