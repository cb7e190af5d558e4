import asyncio

import pytest

from fabric.errors import OverloadedError
from router.events import AgentErased, DrainChanged, FleetEvents, NodeChanged
from router.limits import FLEET_EVENTS_MAX, FLEET_FOLLOWERS_MAX
from tests.router.fake_memory import ScaledClock

pytestmark = pytest.mark.anyio
READY = NodeChanged("node-a", "ready", None)
OPERATOR = None


def erased(agent, tenant="one"):
    return AgentErased((tenant, agent))


async def taken(subscription):
    """Return the waiting events, if there are any."""
    subscription._news.set()
    return await subscription.take()


async def told(subscription):
    return [each.event for each in await taken(subscription)]


async def test_events_come_in_order_to_everybody_who_may_learn_of_them():
    events = FleetEvents(ScaledClock())
    operator, _ = events.follow("operator ops", OPERATOR)
    one, _ = events.follow("one", "one")
    drained = DrainChanged("node-a", "drained", 1, 0, 100)
    for event in (READY, erased("alice"), erased("bob", "two"), drained):
        events.publish(event)

    assert await told(operator) == [READY, erased("alice"), erased("bob", "two"), drained]
    assert await told(one) == [READY, erased("alice")]
    assert await told(one) == []


async def test_a_slow_follower_holds_a_bounded_number_and_knows_how_many_it_missed():
    events = FleetEvents(ScaledClock())
    slow, _ = events.follow("one", "one")
    quick, _ = events.follow("two", "two")
    for number in range(FLEET_EVENTS_MAX):
        events.publish(erased(f"a{number}"))
        events.publish(erased(f"b{number}", "two"))
        assert len(await told(quick)) == 1
    assert slow.missed_count == 0
    for number in range(1_000):
        events.publish(erased(f"c{number}"))
        assert len(slow._waiting) <= FLEET_EVENTS_MAX
        assert len(events._kept) <= FLEET_EVENTS_MAX

    assert await told(slow) == []
    assert slow.start_anew() == FLEET_EVENTS_MAX + 1_000, "and none of the other tenant's"
    events.publish(erased("later"))
    assert await told(slow) == [erased("later")]


async def test_who_comes_back_goes_on_behind_what_it_has_seen():
    events = FleetEvents(ScaledClock())
    first, goes_on = events.follow("one", "one")
    seen = events.last_id
    events.publish(erased("alice"))
    events.publish(erased("bob", "two"))
    events.publish(erased("carol"))
    assert not goes_on
    alice, carol = await taken(first)

    again, goes_on = events.follow("one", "one", events.id_of(alice.number))
    assert goes_on
    assert await told(again) == [erased("carol")]
    again, _ = events.follow("one", "one", seen)
    assert await told(again) == [erased("alice"), erased("carol")]
    again, goes_on = events.follow("one", "one", events.id_of(carol.number))
    assert goes_on
    assert await told(again) == []


@pytest.mark.parametrize("name", ["", "no-id", "0" * 24, "é"])
async def test_an_id_that_is_not_kept_begins_anew(name):
    events = FleetEvents(ScaledClock())
    gone = events.last_id
    for _ in range(FLEET_EVENTS_MAX + 1):
        events.publish(READY)
    subscription, goes_on = events.follow("one", "one", name)
    assert not goes_on
    assert await told(subscription) == []
    assert not events.follow("one", "one", gone)[1]


async def test_ids_count_nothing():
    events = FleetEvents(ScaledClock())
    names = []
    for _ in range(50):
        events.publish(READY)
        names.append(events.last_id)
    assert len(set(names)) == 50
    assert sorted(names) != names
    assert FleetEvents(ScaledClock()).last_id not in names


async def test_followers_are_bounded_and_nobody_takes_all_places():
    events = FleetEvents(ScaledClock())
    taken = [events.follow("one", "one")[0] for _ in range(FLEET_FOLLOWERS_MAX // 2)]
    with pytest.raises(OverloadedError):
        events.follow("one", "one")
    events.follow("two", "two")
    events.leave(taken[0])
    events.leave(taken[0])
    events.leave(taken[1])
    events.follow("one", "one")


async def test_the_end_ends_whoever_waits_and_whoever_comes():
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
