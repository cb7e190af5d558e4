"""GET /metrics, for operators, in Prometheus' text format."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.fleet.fleet import Fleet
from router.http.auth import require_operator
from router.telemetry import Telemetry


class MetricsApi:
    """Metrics of the router."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._telemetry = telemetry

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """Render all metrics, which are sums over all tenants."""
        require_operator(request)
        body = self._telemetry.exposition(self._fleet.membership)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})
