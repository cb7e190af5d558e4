"""GET /healthz: the one route without a key; strangers learn the status only."""

from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric import __version__
from fabric.codec import to_plain
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
from router.http.auth import caller_of


class HealthApi:
    """Is anybody there, and does everybody remember?"""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [Route("/healthz", self.check, methods=["GET"])]

    async def check(self, request: Request) -> Response:
        """Answer 200 while at least one node serves; only operators read more than how it is."""
        nodes = [self._node(member) for member in self._fleet.membership.members]
        is_serving = bool(self._fleet.ready())
        is_whole = is_serving and all(node["ok"] for node in nodes)
        status = "ok" if is_whole else "degraded" if is_serving else "unavailable"
        code = HTTPStatus.OK if is_serving else HTTPStatus.SERVICE_UNAVAILABLE
        body: dict[str, Any] = {"status": status}
        if caller_of(request).operator is not None:
            body |= {"version": __version__, "nodes": nodes}
        return JSONResponse(body, code)

    def _node(self, member: Member) -> dict[str, Any]:
        view = member.view
        health = self._fleet.membership.health(member.name)
        is_ok = (
            view is not None
            and health is LeaseState.ALIVE
            and view.self_test.passed
            and view.degraded is None
        )
        return {
            "name": member.name,
            "state": health.value,
            "ok": is_ok,
            "self_test": to_plain(view.self_test) if view else None,
            "reuse": view.reuse if view else None,
            "degraded": view.degraded if view else None,
            "damaged_blocks": view.damaged_blocks if view else None,
        }
