"""GET /healthz, also called /health: without a key; strangers learn the status only."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.views.health import DOWN, health_row
from router.fleet.fleet import Fleet
from router.http.auth import caller_of


class HealthApi:
    """Is anybody there, and does everybody remember?"""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.check, methods=["GET"]),
            Route("/health", self.check, methods=["GET"]),  # as other model servers have it
        ]

    async def check(self, request: Request) -> Response:
        """Answer 200 while at least one node serves; only operators read more than how it is."""
        row = health_row(self._fleet, caller_of(request))
        is_down = row["status"] == DOWN
        return JSONResponse(row, HTTPStatus.SERVICE_UNAVAILABLE if is_down else HTTPStatus.OK)
