import asyncio

import pytest

from fabric.errors import OverloadedError
from router.events import AgentErased, DrainChanged, FleetEvents, NodeChanged
from router.limits import FLEET_EVENTS_MAX, FLEET_FOLLOWERS_MAX
from tests.support.clocks import ScaledClock

pytestmark = pytest.mark.anyio
READY = NodeChanged("node-a", "ready", None)
OPERATOR = None


def erased(agent, tenant="one"):
    return AgentErased((tenant, agent))


async def waiting_events(subscription):
    """Return the waiting events, if there are any."""
    subscription._news.set()
    return await subscription.take()


async def events_of(subscription):
    return [each.event for each in await waiting_events(subscription)]


async def test_events_arrive_in_order_at_permitted_followers():
    events = FleetEvents(ScaledClock())
    operator, _ = events.follow("operator ops", OPERATOR)
    one, _ = events.follow("one", "one")
    drained = DrainChanged("node-a", "drained", 1, 0, 100)
    for event in (READY, erased("alice"), erased("bob", "two"), drained):
        events.publish(event)

    assert await events_of(operator) == [READY, erased("alice"), erased("bob", "two"), drained]
    assert await events_of(one) == [READY, erased("alice")]
    assert await events_of(one) == []


async def test_slow_follower_is_bounded_and_counts_missed_events():
    events = FleetEvents(ScaledClock())
    slow, _ = events.follow("one", "one")
    quick, _ = events.follow("two", "two")
    for number in range(FLEET_EVENTS_MAX):
        events.publish(erased(f"a{number}"))
        events.publish(erased(f"b{number}", "two"))
        assert len(await events_of(quick)) == 1
    assert slow.missed_count == 0
    for number in range(1_000):
        events.publish(erased(f"c{number}"))
        assert len(slow._waiting) <= FLEET_EVENTS_MAX
        assert len(events._kept) <= FLEET_EVENTS_MAX

    assert await events_of(slow) == []
    assert slow.restart() == FLEET_EVENTS_MAX + 1_000, "without the other tenant's events"
    events.publish(erased("later"))
    assert await events_of(slow) == [erased("later")]


async def test_returning_follower_resumes_after_its_last_event():
    events = FleetEvents(ScaledClock())
    first, has_resumed = events.follow("one", "one")
    seen = events.last_id
    events.publish(erased("alice"))
    events.publish(erased("bob", "two"))
    events.publish(erased("carol"))
    assert not has_resumed
    alice, carol = await waiting_events(first)

    again, has_resumed = events.follow("one", "one", events.id_of(alice.number))
    assert has_resumed
    assert await events_of(again) == [erased("carol")]
    again, _ = events.follow("one", "one", seen)
    assert await events_of(again) == [erased("alice"), erased("carol")]
    again, has_resumed = events.follow("one", "one", events.id_of(carol.number))
    assert has_resumed
    assert await events_of(again) == []


@pytest.mark.parametrize("name", ["", "no-id", "0" * 24, "é"])
async def test_unknown_event_id_starts_over(name):
    events = FleetEvents(ScaledClock())
    gone = events.last_id
    for _ in range(FLEET_EVENTS_MAX + 1):
        events.publish(READY)
    subscription, has_resumed = events.follow("one", "one", name)
    assert not has_resumed
    assert await events_of(subscription) == []
    assert not events.follow("one", "one", gone)[1]


async def test_event_ids_are_opaque():
    events = FleetEvents(ScaledClock())
    names = []
    for _ in range(50):
        events.publish(READY)
        names.append(events.last_id)
    assert len(set(names)) == 50
    assert sorted(names) != names
    assert FleetEvents(ScaledClock()).last_id not in names


async def test_followers_are_bounded_in_total_and_per_tenant():
    events = FleetEvents(ScaledClock())
    followers = [events.follow("one", "one")[0] for _ in range(FLEET_FOLLOWERS_MAX // 2)]
    with pytest.raises(OverloadedError):
        events.follow("one", "one")
    events.follow("two", "two")
    events.leave(followers[0])
    events.leave(followers[0])
    events.leave(followers[1])
    events.follow("one", "one")


async def test_closing_ends_waiting_and_new_followers():
    events = FleetEvents(ScaledClock())
    one, _ = events.follow("one", "one")
    waiting = asyncio.create_task(one.take())
    resting = asyncio.create_task(one.rest(3600.0))
    await asyncio.sleep(0)
    events.close()
    assert await waiting == []
    await resting
    assert one.is_closed
    assert events.follow("two", "two")[0].is_closed
