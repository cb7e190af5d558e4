"""GET /v1/events: the fleet's events as server-sent events.

    snapshot ──▶ event ──▶ event ──▶ event
                   └──▶ too slow: missed ──▶ snapshot ──▶ event

Operators see everything; a tenant sees its own agents, and what GET /v1/nodes shows it of nodes.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.admin.views.events import Snapshots, event_row
from router.events import FleetEvents, Subscription
from router.http.auth import caller_of, tenant_of
from router.http.errors import ErrorDialect
from router.http.forwarded import Principal
from router.http.sse import COMMENT, EventStream, frame
from router.limits import FLEET_SNAPSHOT_EVERY_S

LAST_ID_HEADER = "last-event-id"
SNAPSHOT = "snapshot"
MISSED = "missed"


class EventsApi:
    """Streams for dashboards, which end when the client disconnects or the router stops."""

    def __init__(self, events: FleetEvents, snapshots: Snapshots, dialect: ErrorDialect) -> None:
        self._events = events
        self._snapshots = snapshots
        self._dialect = dialect

    def routes(self) -> list[Route]:
        return [Route("/v1/events", self.follow, methods=["GET"])]

    async def follow(self, request: Request) -> Response:
        """Start with a snapshot, or after the last event that the client has seen."""
        if request.method == "HEAD":  # a stream without a body would have no end
            return Response(media_type="text/event-stream")
        caller = caller_of(request)
        tenant = tenant_of(request) if caller.operator is None else None
        after = request.headers.get(LAST_ID_HEADER)
        subscription, is_resumed = self._events.follow(caller.owner, tenant, after)

        async def leave() -> None:
            self._events.leave(subscription)

        frames = self._frames(subscription, caller, is_resumed=is_resumed)
        return EventStream(frames, {}, leave, self._dialect)

    async def _frames(
        self, subscription: Subscription, caller: Principal, *, is_resumed: bool
    ) -> AsyncGenerator[bytes, None]:
        yield COMMENT if is_resumed else await self._snapshot(caller)
        while not subscription.is_closed:
            events = await subscription.take()
            if subscription.missed_count:
                # A client too slow for events must not get a snapshot each time instead.
                await subscription.rest(FLEET_SNAPSHOT_EVERY_S)
                missed = frame({"count": subscription.restart()}, MISSED)
                yield missed + await self._snapshot(caller)
            else:
                rows = ((event_row(e, caller), e.event.name, e.number) for e in events)
                ids = self._events.id_of
                yield b"".join(frame(row, name, ids(number)) for row, name, number in rows)

    async def _snapshot(self, caller: Principal) -> bytes:
        name = self._events.last_id  # later events follow it
        return frame(await self._snapshots.show(caller), SNAPSHOT, name)
