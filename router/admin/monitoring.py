"""Routes of monitoring: GET /healthz and /health without a key, GET /metrics for operators."""

from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.router import router_row
from router.admin.views.nodes import DOWN, DRAINING, health_row
from router.fleet.fleet import Fleet
from router.fleet.term_keeper import TermKeeper
from router.http.auth import caller_of, require_operator
from router.telemetry import Telemetry
from router.turns.open_turn import RunningTurns


class HealthApi:
    """Health of the router and its nodes."""

    def __init__(self, fleet: Fleet, turns: RunningTurns) -> None:
        self._fleet = fleet
        self._turns = turns

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.check, methods=["GET"]),
            Route("/health", self.check, methods=["GET"]),  # the path of other model servers
        ]

    async def check(self, request: Request) -> Response:
        """Answer 200 while turns are accepted; show details to operators only."""
        row = health_row(self._fleet, caller_of(request))
        if self._turns.is_refusing:
            row["status"] = DRAINING
        is_down = row["status"] in (DOWN, DRAINING)
        return JSONResponse(row, HTTPStatus.SERVICE_UNAVAILABLE if is_down else HTTPStatus.OK)


class MetricsApi:
    """Metrics of the router."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry, terms: TermKeeper | None) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._terms = terms

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """Render all metrics, of all tenants."""
        require_operator(request)
        voted = router_row(self._fleet, self._terms)
        self._telemetry.note_router(
            is_active=self._fleet.terms.is_active,
            expected=voted["voters"],
            answering=voted["voters_answering"],
            needed=self._terms.terms.quorum if self._terms is not None else 0,
        )
        body = self._telemetry.exposition(self._fleet.membership)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})
