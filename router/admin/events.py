"""GET /v1/events: what happens in the fleet, as server-sent events.

    snapshot ──▶ event ──▶ event ──▶ event
                   └──▶ too slow: missed ──▶ snapshot ──▶ event

Operators see everything, a tenant its own agents and what GET /v1/nodes tells it of nodes.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.admin.views.events import Snapshots, event_row
from router.events.bus import FleetEvents, Subscription
from router.http.auth import Principal, caller_of, tenant_of
from router.http.dialect import ErrorDialect
from router.http.sse import COMMENT, EventStream, frame
from router.limits import FLEET_SNAPSHOT_EVERY_S

LAST_ID_HEADER = "last-event-id"
SNAPSHOT = "snapshot"
MISSED = "missed"


class EventsApi:
    """Streams for dashboards; each ends when its client goes, or the router stops."""

    def __init__(self, events: FleetEvents, snapshots: Snapshots, dialect: ErrorDialect) -> None:
        self._events = events
        self._snapshots = snapshots
        self._dialect = dialect

    def routes(self) -> list[Route]:
        return [Route("/v1/events", self.follow, methods=["GET"])]

    async def follow(self, request: Request) -> Response:
        """Begin with a snapshot, or behind the event that the client has seen last."""
        if request.method == "HEAD":  # a stream without a body would have no end
            return Response(media_type="text/event-stream")
        caller = caller_of(request)
        tenant = tenant_of(request) if caller.operator is None else None
        after = request.headers.get(LAST_ID_HEADER)
        subscription, goes_on = self._events.follow(caller.owner, tenant, after)

        async def leave() -> None:
            self._events.leave(subscription)

        frames = self._frames(subscription, caller, goes_on=goes_on)
        return EventStream(frames, {}, leave, self._dialect)

    async def _frames(
        self, subscription: Subscription, caller: Principal, *, goes_on: bool
    ) -> AsyncGenerator[bytes, None]:
        yield COMMENT if goes_on else await self._snapshot(caller)
        while not subscription.is_closed:
            events = await subscription.take()
            if subscription.missed_count:
                # Who is too slow for events must not get snapshots all the time instead.
                await subscription.rest(FLEET_SNAPSHOT_EVERY_S)
                missed = frame({"count": subscription.start_anew()}, MISSED)
                yield missed + await self._snapshot(caller)
            else:
                told = ((event_row(e, caller), e.event.name, e.number) for e in events)
                ids = self._events.id_of
                yield b"".join(frame(row, name, ids(number)) for row, name, number in told)

    async def _snapshot(self, caller: Principal) -> bytes:
        name = self._events.last_id  # what happens from here on comes behind it
        return frame(await self._snapshots.show(caller), SNAPSHOT, name)
