"""Route of the history of an agent's turns, as its owner keeps it in the agent's record."""

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.calls import UNKNOWN_CALL
from fabric.control.turn_calls import ReadTurns, TurnsView
from fabric.errors import RejectedError
from fabric.limits import TURN_HISTORY_MAX
from router.admin.views.turns import turn_rows
from router.fleet.fleet import Fleet
from router.http.auth import shown_agent_key
from router.http.paging import limit_of

PATH: Final = "/v1/agents/{agent}/turns"


class TurnsApi:
    """Last turns of agents: their times, what they reused, and why no more."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """List an agent's last turns, the newest first."""
        key = shown_agent_key(request)
        limit = limit_of(request.query_params, TURN_HISTORY_MAX)
        owner = await self._fleet.reread_owner(key)
        try:
            view = await self._fleet.link(owner.node).call(ReadTurns(*key), TurnsView)
        except RejectedError as error:
            if error.code != UNKNOWN_CALL:
                raise
            view = TurnsView(())  # a node of an earlier version keeps none
        newest = view.turns[::-1]
        rows = turn_rows(newest)[:limit]
        return JSONResponse(
            {"object": "list", "data": rows, "id": key[1], "has_more": len(newest) > limit}
        )
