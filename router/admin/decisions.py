"""Route of placement's last decisions, for operators."""

import json
from itertools import islice
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.errors import RejectedError
from router.http.auth import require_operator
from router.turns.decision_log import DecisionLog, trace_rows

PATH: Final = "/v1/placement/decisions"
TRACE: Final = "trace"
TRACE_TYPE: Final = "application/x-ndjson"


class DecisionsApi:
    """Decisions with their estimates and what then happened, as a list or as a trace."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """List the newest decisions first; with `format=trace`, answer rows for the simulator."""
        require_operator(request)
        entries, wanted = self._log.entries, request.query_params.get("format", "list")
        if wanted == TRACE:
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in trace_rows(entries))
            return Response("".join(lines), media_type=TRACE_TYPE)
        if wanted != "list":
            message = f"format must be list or {TRACE}"
            raise RejectedError(message, param="format", code="invalid_value")
        newest = islice(reversed(entries), _limit(request))
        rows = [entry.as_row() for entry in newest]
        return JSONResponse({"object": "list", "data": rows})


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text)):
        message = "limit must be a whole number from 1 to 999999"
        raise RejectedError(message, param="limit", code="invalid_value")
    return int(text)
