"""Brings events to whoever follows the fleet, and never waits for any of them.

    publish ──▶ kept: the last FLEET_EVENTS_MAX, for who comes back with the id of one
            └─▶ each subscription: as many, then none until it has been told how many it missed

A subscription that falls behind loses its events at once and counts the further ones: whoever
reads it needs a fresh snapshot, which stands for all of them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from fabric.errors import OverloadedError
from fabric.fair_share import FairShare
from fabric.ids import TenantId
from fabric.ports import Clock
from router.events.fleet_event import FleetEvent, concerns
from router.fresh_ids import fresh_event_key
from router.limits import FLEET_EVENTS_MAX, FLEET_FOLLOWERS_MAX

Publish: TypeAlias = Callable[[FleetEvent], None]
_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class Published:
    """An event, when it happened by the calendar, and its place among all events."""

    number: int
    at_s: float
    event: FleetEvent


class Subscription:
    """Events still to be sent to one follower."""

    def __init__(self, owner: str, tenant: TenantId | None) -> None:
        """Follow for a tenant, or with None for an operator, who is told everything."""
        self.owner = owner
        self.missed_count = 0
        self._closed = asyncio.Event()
        self._tenant = tenant
        self._waiting: deque[Published] = deque()
        self._news = asyncio.Event()

    def offer(self, published: Published) -> None:
        """Keep an event that the follower may learn of, or count it where there is no room."""
        if self._tenant is not None and not concerns(published.event, self._tenant):
            return
        if self.missed_count == 0 and len(self._waiting) < FLEET_EVENTS_MAX:
            self._waiting.append(published)
        else:
            self.missed_count += 1 + len(self._waiting)
            self._waiting.clear()
        self._news.set()

    async def take(self) -> list[Published]:
        """Wait for events; none where some were missed, or this was closed."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    async def rest(self, seconds: float) -> None:
        """Let so much time go by, unless this is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def start_anew(self) -> int:
        """Be told again, from now on; return how many events were missed."""
        missed_count, self.missed_count = self.missed_count, 0
        return missed_count

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        self._news.set()


class FleetEvents:
    """The bus: published to from one place per concept, and followed by a few."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._kept: deque[Published] = deque(maxlen=FLEET_EVENTS_MAX)
        self._followers: set[Subscription] = set()
        self._places = FairShare[str](FLEET_FOLLOWERS_MAX)
        self._key: bytes | None = None  # until somebody follows
        self._is_closed = False

    def publish(self, event: FleetEvent) -> None:
        """Tell whoever follows."""
        self._count += 1
        published = Published(self._count, self._clock.wall_s(), event)
        self._kept.append(published)
        for follower in self._followers:
            follower.offer(published)

    def follow(
        self, owner: str, tenant: TenantId | None, after: str | None = None
    ) -> tuple[Subscription, bool]:
        """Follow from now on, or from behind the event `after`; say whether that is known.

        Raises OverloadedError where too many follow already.
        """
        if not self._places.take(owner):
            message = "too many follow the fleet's events already"
            raise OverloadedError(message)
        subscription = Subscription(owner, tenant)
        self._followers.add(subscription)
        if self._is_closed:
            subscription.close()
        number = None if after is None else self._number_of(after)
        if number is None:
            return subscription, False
        for published in self._kept:
            if published.number > number:
                subscription.offer(published)
        return subscription, True

    def leave(self, subscription: Subscription) -> None:
        """Stop following; repeatable."""
        if subscription in self._followers:
            self._followers.discard(subscription)
            self._places.give(subscription.owner)

    def close(self) -> None:
        """End what everybody follows: the router stops."""
        self._is_closed = True
        for follower in self._followers:
            follower.close()

    @property
    def last_id(self) -> str:
        """The id of what happened last."""
        return self.id_of(self._count)

    def id_of(self, number: int) -> str:
        """Name an event so that its id tells no tenant how much others do."""
        if self._key is None:
            self._key = fresh_event_key()
        raw = number.to_bytes(8, "big")
        return blake2b(raw, digest_size=_ID_BYTES, key=self._key).hexdigest()

    def _number_of(self, name: str) -> int | None:
        """Find an event by its id, as long as all that came after it is kept."""
        first = self._count - len(self._kept)
        return next((n for n in range(first, self._count + 1) if self.id_of(n) == name), None)
