"""Bus of the fleet's events, which never waits for its followers.

    publish ──▶ kept: the last FLEET_EVENTS_MAX, for followers that reconnect with an event id
            └─▶ each subscription: as many, then none until its follower knows how many it missed

A subscription that falls behind drops its events at once and counts further ones: its follower
needs a new snapshot, which replaces all of them.
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
    """Event with its wall-clock time and its number among all events."""

    number: int
    at_s: float
    event: FleetEvent


class Subscription:
    """Events still to be sent to one follower."""

    def __init__(self, owner: str, tenant: TenantId | None) -> None:
        """Follow the events of a tenant, or with None all events, for an operator."""
        self.owner = owner
        self.missed_count = 0
        self._closed = asyncio.Event()
        self._tenant = tenant
        self._waiting: deque[Published] = deque()
        self._news = asyncio.Event()

    def offer(self, published: Published) -> None:
        """Queue an event that the follower may see, or count it if the queue is full."""
        if self._tenant is not None and not concerns(published.event, self._tenant):
            return
        if self.missed_count == 0 and len(self._waiting) < FLEET_EVENTS_MAX:
            self._waiting.append(published)
        else:
            self.missed_count += 1 + len(self._waiting)
            self._waiting.clear()
        self._news.set()

    async def take(self) -> list[Published]:
        """Wait for events and return them; empty if some were missed or this was closed."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    async def rest(self, seconds: float) -> None:
        """Wait for `seconds`, or until this is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def start_anew(self) -> int:
        """Receive events again from now on; return how many were missed."""
        missed_count, self.missed_count = self.missed_count, 0
        return missed_count

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        self._news.set()


class FleetEvents:
    """Events of the fleet, and the subscriptions of those who follow them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._kept: deque[Published] = deque(maxlen=FLEET_EVENTS_MAX)
        self._followers: set[Subscription] = set()
        self._slots = FairShare[str](FLEET_FOLLOWERS_MAX)
        self._key: bytes | None = None  # set with the first follower
        self._is_closed = False

    def publish(self, event: FleetEvent) -> None:
        """Send an event to all followers."""
        self._count += 1
        published = Published(self._count, self._clock.wall_s(), event)
        self._kept.append(published)
        for follower in self._followers:
            follower.offer(published)

    def follow(
        self, owner: str, tenant: TenantId | None, after: str | None = None
    ) -> tuple[Subscription, bool]:
        """Subscribe from now on, or from after the event `after`; return whether that is known.

        Raises OverloadedError if there are too many followers.
        """
        if not self._slots.take(owner):
            message = "too many clients follow the fleet's events already"
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
            self._slots.give(subscription.owner)

    def close(self) -> None:
        """End all subscriptions, as the router stops."""
        self._is_closed = True
        for follower in self._followers:
            follower.close()

    @property
    def last_id(self) -> str:
        """Id of the last event."""
        return self.id_of(self._count)

    def id_of(self, number: int) -> str:
        """Return an event's id, which does not reveal how many events other tenants cause."""
        if self._key is None:
            self._key = fresh_event_key()
        raw = number.to_bytes(8, "big")
        return blake2b(raw, digest_size=_ID_BYTES, key=self._key).hexdigest()

    def _number_of(self, name: str) -> int | None:
        """Return an event's number, if all later events are still kept."""
        first = self._count - len(self._kept)
        return next((n for n in range(first, self._count + 1) if self.id_of(n) == name), None)
