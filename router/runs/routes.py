"""/v1/scenarios: runs that the router performs, each seen by its own tenant alone."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.auth import tenant_of
from router.http.dialect import ErrorDialect
from router.http.fields import query_flag
from router.http.json_body import read_parsed
from router.http.sse import EventStream
from router.runs.hosted_run import HostedRun
from router.runs.runs import Runs
from router.runs.wanted_run import parse_wanted

PATH = "/v1/scenarios"
LAST_ID_HEADER = "last-event-id"
_EVENTS = "text/event-stream"


class RunsApi:
    """Runs begun, shown, followed, cancelled and forgotten."""

    def __init__(self, runs: Runs, dialect: ErrorDialect) -> None:
        self._runs = runs
        self._dialect = dialect

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.begin, methods=["POST"]),
            Route(PATH, self.index, methods=["GET"]),
            Route(f"{PATH}/{{run}}", self.show, methods=["GET"]),
            Route(f"{PATH}/{{run}}", self.remove, methods=["DELETE"]),
        ]

    async def begin(self, request: Request) -> Response:
        """Begin a run; the same request with the same `run` begins no second one."""
        tenant = tenant_of(request)
        wanted = await read_parsed(request, parse_wanted)
        hosted = await self._runs.begin(tenant, wanted)
        status = HTTPStatus.ACCEPTED if hosted.is_running else HTTPStatus.OK
        location = {"location": f"{PATH}/{hosted.record.name}"}
        return JSONResponse(hosted.row(), status, location)

    async def index(self, request: Request) -> Response:
        """List the tenant's own."""
        rows = [hosted.row() for hosted in await self._runs.all(tenant_of(request))]
        return JSONResponse({"object": "list", "data": rows})

    async def show(self, request: Request) -> Response:
        """Show one with all that was said, or follow it."""
        hosted = await self._runs.get(tenant_of(request), request.path_params["run"])
        if not _wants_events(request):
            return JSONResponse(await hosted.whole_row())
        if request.method == "HEAD":  # a stream without a body would have no end
            return Response(media_type=_EVENTS)
        return await self._followed(hosted, request.headers.get(LAST_ID_HEADER))

    async def _followed(self, hosted: HostedRun, after: str | None) -> Response:
        log = await hosted.log()
        log.join()

        async def leave() -> None:
            log.leave()

        return EventStream(log.frames(after), {}, leave, self._dialect)

    async def remove(self, request: Request) -> Response:
        """Cancel one that is under way, and keep it; forget one that has ended."""
        name = request.path_params["run"]
        removed = await self._runs.remove(tenant_of(request), name)
        told = {"cancelled": removed.was_cancelled, "deleted": removed.is_gone}
        return JSONResponse({"id": name, "object": "scenario.run.deleted", **told})


def _wants_events(request: Request) -> bool:
    is_accepted = _EVENTS in request.headers.get("accept", "")
    return query_flag(request.query_params, "stream", default=is_accepted)
