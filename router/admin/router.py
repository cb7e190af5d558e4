"""Routes about the routers of a fabric: which one is active, and promotion by hand."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.errors import ConflictError
from router.admin.views.shape import Row
from router.fleet.fleet import Fleet
from router.fleet.term_keeper import TermKeeper
from router.http.auth import caller_of, require_operator, tenant_of

SOLE, ACTIVE, STANDBY = ROLES = ("sole", "active", "standby")


class RouterApi:
    """This router's part among the routers of its fabric."""

    def __init__(self, fleet: Fleet, terms: TermKeeper | None) -> None:
        self._fleet = fleet
        self._terms = terms

    def routes(self) -> list[Route]:
        return [
            Route("/v1/router", self.show, methods=["GET"]),
            Route("/v1/router/promote", self.promote, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Return this router's role, even if another router is active."""
        if caller_of(request).operator is None:
            tenant_of(request)  # raises for callers with neither key
        return JSONResponse(router_row(self._fleet, self._terms))

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


def router_row(fleet: Fleet, terms: TermKeeper | None) -> Row:
    """Return a router's role, its term and its voters as a JSON row."""
    url = fleet.urls[0] if fleet.urls else ""
    row: Row = {"object": "router", "role": SOLE, "url": url, "active_url": url, "term": None}
    row |= {"voters": 0, "voters_answering": 0, "promoted": False, "problem": None}
    if terms is None:
        return row
    asked = terms.terms.last_round
    return row | {
        "role": ACTIVE if terms.is_active else STANDBY,
        "active_url": url if terms.is_active else terms.active_url,
        "term": terms.held() if terms.is_active else terms.terms.highest.term,
        "voters": terms.terms.voters_count,
        "voters_answering": asked.answered_count if asked is not None else 0,
        "promoted": terms.is_active and terms.terms.is_forced,
        "problem": terms.problem,
    }
