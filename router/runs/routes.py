"""Routes of /v1/scenarios: a tenant's scenario runs in the router."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.auth import tenant_of
from router.http.errors import ErrorDialect
from router.http.json_body import read_parsed
from router.http.refusals import query_flag
from router.http.sse import EventStream
from router.large_work import run_apart
from router.runs.hosted_run import HostedRun
from router.runs.run_request import parse_run_request
from router.runs.runs import Runs
from router.scenario.source import shipped_titles

PATH = "/v1/scenarios"
LAST_ID_HEADER = "last-event-id"
_EVENTS = "text/event-stream"


class RunsApi:
    """Handlers that start, show, follow, cancel and delete runs."""

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
        """Start a run; a repeated request with the same `run` returns or resumes it."""
        tenant = tenant_of(request)
        run_request = await read_parsed(request, parse_run_request)
        hosted = await self._runs.begin(tenant, run_request)
        status = HTTPStatus.ACCEPTED if hosted.is_running else HTTPStatus.OK
        location = {"location": f"{PATH}/{hosted.record.name}"}
        return JSONResponse(hosted.row(), status, location)

    async def index(self, request: Request) -> Response:
        """List the tenant's runs, and the shipped scenarios, which it may start."""
        tenant = tenant_of(request)
        rows = [hosted.row() for hosted in await self._runs.all(tenant)]
        titles = await run_apart(tenant, shipped_titles)  # the first time it reads files
        shipped = [{"name": name, "title": title} for name, title in titles.items()]
        return JSONResponse({"object": "list", "data": rows, "shipped": shipped})

    async def show(self, request: Request) -> Response:
        """Return a run with its transcripts, or stream its events."""
        hosted = await self._runs.get(tenant_of(request), request.path_params["run"])
        if not _wants_events(request):
            return JSONResponse(await hosted.full_row())
        if request.method == "HEAD":  # a stream without a body would never end
            return Response(media_type=_EVENTS)
        return await self._stream(hosted, request.headers.get(LAST_ID_HEADER))

    async def _stream(self, hosted: HostedRun, after: str | None) -> Response:
        log = await hosted.log()
        log.join()

        async def leave() -> None:
            log.leave()

        return EventStream(log.frames(after), {}, leave, self._dialect)

    async def remove(self, request: Request) -> Response:
        """Cancel a running run and keep it; delete one that has ended."""
        name = request.path_params["run"]
        removed = await self._runs.remove(tenant_of(request), name)
        fields = {"cancelled": removed.was_cancelled, "deleted": removed.is_deleted}
        return JSONResponse({"id": name, "object": "scenario.run.deleted", **fields})


def _wants_events(request: Request) -> bool:
    is_accepted = _EVENTS in request.headers.get("accept", "")
    return query_flag(request.query_params, "stream", default=is_accepted)
