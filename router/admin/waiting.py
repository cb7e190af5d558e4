"""Routes whose requests wait until what their path names can be known."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.fleet.meeting import Meeting

NODES = "/v1/nodes"  # shows who is there now, and who is joining


class _Waiting:
    """One route behind a meeting."""

    def __init__(self, app: ASGIApp, meeting: Meeting) -> None:
        self._app = app
        self._meeting = meeting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = Request(scope).path_params
        if "node" in names:
            await self._meeting.node(names["node"])
        elif scope["path"] == NODES:
            await self._meeting.roster()
        else:
            await self._meeting.agents()
        await self._app(scope, receive, send)


def waiting(routes: Sequence[Route], meeting: Meeting) -> list[Route]:
    """Let requests of these routes wait for the nodes that a new router has not met."""
    for route in routes:
        route.app = _Waiting(route.app, meeting)
    return list(routes)
