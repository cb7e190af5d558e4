"""Route of placement's last decisions, for operators."""

import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.errors import RejectedError
from router.admin.views.fleet_model import fleet_model
from router.fleet.fleet import Fleet
from router.http.auth import require_operator
from router.http.paging import AFTER, limit_of, page_response
from router.http.refusals import refuse
from router.limits import DECISIONS_KEPT_MAX
from router.turns.decision_log import ID_PREFIX, DecidedTurn, DecisionLog, trace_rows

PATH: Final = "/v1/placement/decisions"
TRACE: Final = "trace"
FLEET: Final = "fleet"
TRACE_TYPE: Final = "application/x-ndjson"
DEFAULT_LIMIT: Final = 100
_DIGITS: Final = 18
FLEET_TYPE: Final = "application/yaml"  # as JSON, which is YAML


class DecisionsApi:
    """Decisions with their estimates and what then happened, as a list or as a trace."""

    def __init__(self, log: DecisionLog, fleet: Fleet) -> None:
        self._log = log
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """List the newest decisions first; answer a trace or a fleet for the simulator."""
        require_operator(request)
        entries, form = self._log.entries, request.query_params.get("format", "list")
        if form == TRACE:
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in trace_rows(entries))
            return Response("".join(lines), media_type=TRACE_TYPE)
        if form == FLEET:
            text = json.dumps(fleet_model(self._fleet), indent=1) + "\n"
            return Response(text, media_type=FLEET_TYPE)
        if form != "list":
            message = f"format must be list, {TRACE} or {FLEET}"
            raise RejectedError(message, param="format", code="invalid_value")
        query = request.query_params
        limit, before = limit_of(query, DECISIONS_KEPT_MAX, DEFAULT_LIMIT), _before(query)
        matching = (
            entry for entry in reversed(entries) if entry.number < before and _matches(entry, query)
        )
        page = list(islice(matching, limit + 1))
        rows = [entry.as_row() for entry in page[:limit]]
        last = rows[-1]["id"] if rows else None
        return JSONResponse(page_response(rows, last, has_more=len(page) > limit))


def _before(query: Mapping[str, str]) -> float:
    """Return the number of the entry that a page begins after, or infinity."""
    after = query.get(AFTER)
    if after is None:
        return math.inf
    digits = after.removeprefix(ID_PREFIX)
    if digits == after or not digits.isascii() or not digits.isdecimal() or len(digits) > _DIGITS:
        refuse(AFTER, "expected the `last_id` of the previous page")
    return int(digits)


def _matches(entry: DecidedTurn, query: Mapping[str, str]) -> bool:
    """Return whether a decision matches the query."""
    facts = {
        "node": entry.admitted.node,
        "cache": entry.admitted.cache.value,
        "turn": entry.turn,
        "agent": entry.agent,
    }
    return all(name not in query or query[name] == value for name, value in facts.items())
