"""GET /v1/events: the fleet's events as server-sent events.

    snapshot ──▶ event ──▶ event ──▶ event
                   └──▶ too slow: missed ──▶ snapshot ──▶ event

Operators see everything; a tenant sees its own agents, and what GET /v1/nodes shows it of nodes.
"""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.ids import TenantId
from router.admin.views.events import Snapshots, event_row
from router.admin.views.shape import Row
from router.events import FleetEvents, Published, Subscription
from router.http.auth import TENANT, caller_of, shown_tenant
from router.http.errors import ErrorDialect
from router.http.forwarded import Principal
from router.http.paging import LIMIT, limit_of
from router.http.refusals import query_flag
from router.http.sse import COMMENT, EventStream, frame
from router.limits import FLEET_SNAPSHOT_EVERY_S, FLEET_STREAM_EVENTS_MAX

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
        caller, event_filter = caller_of(request), EventFilter.of(request)
        if not event_filter.follows:
            return Response(self._past(caller, event_filter), media_type="text/event-stream")
        after = request.headers.get(LAST_ID_HEADER)
        tenant = event_filter.tenant
        subscription, is_resumed = self._events.follow(caller.owner, tenant, after)

        async def leave() -> None:
            self._events.leave(subscription)

        frames = self._frames(subscription, caller, event_filter, is_resumed=is_resumed)
        return EventStream(frames, {}, leave, self._dialect)

    async def _frames(
        self,
        subscription: Subscription,
        caller: Principal,
        event_filter: "EventFilter",
        *,
        is_resumed: bool,
    ) -> AsyncGenerator[bytes, None]:
        begins = not is_resumed and event_filter.has_snapshot
        yield await self._snapshot(caller, event_filter) if begins else COMMENT
        left_count = event_filter.limit
        while not subscription.is_closed and (left_count is None or left_count > 0):
            events = await subscription.take()
            if subscription.missed_count:
                # A client too slow for events must not get a snapshot each time instead.
                await subscription.rest(FLEET_SNAPSHOT_EVERY_S)
                missed = frame({"count": subscription.restart()}, MISSED)
                more = (
                    await self._snapshot(caller, event_filter) if event_filter.has_snapshot else b""
                )
                yield missed + more
                continue
            frames = self._frames_of(events, caller, event_filter)[:left_count]
            left_count = None if left_count is None else left_count - len(frames)
            yield b"".join(frames)

    def _past(self, caller: Principal, event_filter: "EventFilter") -> bytes:
        """Return the kept events, or the last `limit` of them."""
        frames = self._frames_of(self._events.past(event_filter.tenant), caller, event_filter)
        return b"".join(frames if event_filter.limit is None else frames[-event_filter.limit :])

    def _frames_of(
        self, events: Iterable[Published], caller: Principal, event_filter: "EventFilter"
    ) -> list[bytes]:
        ids = self._events.id_of
        rows = ((e, event_row(e, caller)) for e in events)
        return [
            frame(row, e.event.name, ids(e.number))
            for e, row in rows
            if event_filter.matches(e, row)
        ]

    async def _snapshot(self, caller: Principal, event_filter: "EventFilter") -> bytes:
        name = self._events.last_id  # later events follow it
        return frame(await self._snapshots.show(caller, event_filter.tenant), SNAPSHOT, name)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Filter of a stream's events."""

    tenant: TenantId | None  # None: all, for operators
    node: str | None = None  # also as the source or target of a move
    agent: str | None = None
    name: str | None = None  # the event's, or its beginning: `agent`, `move.state`
    limit: int | None = None  # events, after which the stream ends
    has_snapshot: bool = True
    follows: bool = True  # False: those that are kept, and no later ones

    @classmethod
    def of(cls, request: Request) -> "EventFilter":
        """Return the filter of a request; raise ForbiddenError for another's tenant."""
        query = request.query_params
        is_whole = caller_of(request).operator is not None and TENANT not in query
        limit = limit_of(query, FLEET_STREAM_EVENTS_MAX) if LIMIT in query else None
        has_snapshot = query_flag(query, "snapshot", default=True)
        follows = query_flag(query, "follow", default=True)
        tenant = None if is_whole else shown_tenant(request)
        node, agent, name = (query.get(part) for part in ("node", "agent", "name"))
        return cls(tenant, node, agent, name, limit, has_snapshot, follows)

    def matches(self, published: Published, row: Row) -> bool:
        """Return whether the filter accepts an event's row."""
        name = published.event.name
        nodes = {row.get(field) for field in ("node", "from", "to", "peer")}
        return (
            (self.name is None or name == self.name or name.startswith(f"{self.name}."))
            and (self.node is None or self.node in nodes)
            and (self.agent is None or row.get("id") == self.agent)
        )
