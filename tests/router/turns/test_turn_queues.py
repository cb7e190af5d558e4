"""Queues in front of nodes: bounds, places, accurate delays, cancelled turns, lost nodes."""

import asyncio
from collections import Counter

import pytest

from fabric.errors import OverloadedError
from fabric.ids import NodeName, TenantId
from fabric.turn.generation import Priority
from router.fleet.node_client import NodeLostError
from router.limits import SENT_BACKGROUND_TURNS_MAX, SENT_TURNS_MAX
from router.telemetry import Telemetry
from router.turns.turn_queues import QueueRules, TurnQueues

pytestmark = pytest.mark.anyio
NODE, OTHER = NodeName("node-a"), NodeName("node-b")
ONE, TWO = TenantId("one"), TenantId("two")
ALONE = SENT_TURNS_MAX // 2  # places of a sole tenant


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic_s(self):
        return self.now_s


class World:
    def __init__(self, waiting_max=256, **weights):
        self.clock = Clock()
        self.telemetry = Telemetry([ONE, TWO])
        self.queues = TurnQueues(QueueRules(waiting_max, weights), self.clock, self.telemetry)
        self.granted = []  # tenants, in the order of their places
        self.places = []
        self.tasks = []

    async def ask(self, count, tenant=ONE, work_s=1.0, priority=Priority.INTERACTIVE, node=NODE):
        async def enter():
            place = await self.queues.enter(node, tenant, priority, work_s)
            self.granted.append(tenant)
            self.places.append(place)

        tasks = [asyncio.create_task(enter()) for _ in range(count)]
        self.tasks += tasks
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    async def admit(self, count=1, each_s=0.0):
        """Admit the `count` turns that were sent first."""
        for _ in range(count):
            self.clock.now_s += each_s
            self.places.pop(0).leave(is_admitted=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def metric(self, name, tenant):
        return self.telemetry.registry.get_sample_value(name, {"tenant": tenant})


async def test_a_node_gets_few_turns_before_it_admits_them():
    world = World()
    await world.ask(100)
    assert len(world.granted) == ALONE
    assert world.queues.waiting_count(NODE) == 100 - ALONE
    assert world.metric("macfabric_waiting_turns", ONE) == 100 - ALONE

    await world.admit(10)
    assert len(world.granted) == ALONE + 10
    await world.end()
    assert world.queues.waiting_count(NODE) == 0
    assert world.metric("macfabric_waiting_turns", ONE) == 0


async def test_a_flood_leaves_room_for_another_tenant():
    world = World()
    await world.ask(300, ONE)
    await world.ask(10, TWO)
    assert world.granted.count(TWO) == 10, "places are free for it at once"
    assert sum(task.done() for task in world.tasks[:300]) == 300 - 128, "sent or refused"
    await world.end()


async def test_two_tenants_that_wait_are_served_by_weight():
    world = World(1_000, one=3.0)
    await world.ask(400, ONE)
    await world.ask(200, TWO)
    await world.admit(80)
    world.granted.clear()
    await world.admit(120)
    served = {tenant: world.granted.count(tenant) for tenant in (ONE, TWO)}
    assert served[ONE] / served[TWO] == pytest.approx(3.0, rel=0.25)
    await world.end()


async def test_more_tenants_than_places_are_served_by_weight():
    """Most tenants have one place at most, so the queue's order decides."""
    heavy, weight = TenantId("heavy"), 16.0
    world = World(10_000, heavy=weight)
    light = [TenantId(f"light-{number}") for number in range(2 * SENT_TURNS_MAX)]
    await world.ask(200, heavy)
    for tenant in light:
        await world.ask(4, tenant)
    await world.admit(SENT_TURNS_MAX)
    assert len(world.places) == SENT_TURNS_MAX, "the node's limit"
    world.granted.clear()
    await world.admit(2 * len(light))

    served = Counter(world.granted)
    of_light = sum(served[tenant] for tenant in light) / len(light)
    assert weight / 3 < served[heavy] / of_light < 1.1 * weight, "a tenant's places are limited"
    assert max(served[tenant] for tenant in light) <= 2
    await world.end()


async def test_a_full_queue_refuses_with_the_time_until_half_of_it_is_gone():
    """By then, half of the tenant's queue is served at the present rate."""
    world = World(waiting_max=64)
    await world.ask(ALONE + 32)
    await world.admit(4, each_s=0.5)
    await world.ask(4)
    waiting = world.queues.waiting_count(NODE)
    with pytest.raises(OverloadedError) as refused:
        await world.queues.enter(NODE, ONE, Priority.INTERACTIVE, 1.0)
    retry_s = refused.value.retry_after_s

    served = 0
    while world.queues.waiting_count(NODE) > waiting // 2:
        await world.admit(1, each_s=0.5)
        served += 1
    assert retry_s == pytest.approx(0.5 * served, rel=0.1)
    assert refused.value.status == 429
    await world.end()


async def test_retry_delay_counts_turns_of_other_tenants():
    world = World(waiting_max=64)
    await world.ask(ALONE + 16, ONE, work_s=2.0)
    alone_s = world.queues.retry_after_s(ONE)
    await world.ask(50, TWO, work_s=2.0)
    assert world.queues.retry_after_s(ONE) == pytest.approx(2 * alone_s)
    await world.end()


async def test_background_turns_take_no_places_of_interactive_ones():
    world = World()
    await world.ask(60, priority=Priority.BACKGROUND)
    assert len(world.granted) == SENT_BACKGROUND_TURNS_MAX // 2
    await world.ask(ALONE)
    assert len(world.granted) == SENT_BACKGROUND_TURNS_MAX // 2 + ALONE
    await world.end()


async def test_a_turn_that_is_cancelled_leaves_its_place_to_the_next():
    world = World()
    tasks = await world.ask(ALONE + 3)
    tasks[ALONE].cancel()  # still waiting
    await asyncio.gather(tasks[ALONE], return_exceptions=True)
    assert world.queues.waiting_count(NODE) == 2
    world.places[0].leave()
    tasks[ALONE + 1].cancel()  # at the moment when it is admitted
    await asyncio.gather(tasks[ALONE + 1], return_exceptions=True)
    await asyncio.sleep(0)
    assert world.queues.waiting_count(NODE) == 0
    assert len(world.granted) == ALONE + 1
    for place in world.places:
        place.leave()
        place.leave()
    await world.ask(SENT_TURNS_MAX)
    assert len(world.granted) == 2 * ALONE + 1, "no place is lost or freed twice"
    await world.end()


async def test_turns_that_wait_for_a_lost_node_go_elsewhere():
    world = World()
    tasks = await world.ask(ALONE + 5)
    others = await world.ask(ALONE + 5, node=OTHER)
    world.queues.sweep(lambda node: node != NODE)
    results = await asyncio.gather(*tasks[ALONE:], return_exceptions=True)

    assert [type(result) for result in results] == [NodeLostError] * 5
    assert {result.node for result in results} == {NODE}
    assert not any(task.done() for task in others[ALONE:])
    await world.end()


async def test_metrics_name_no_tenant_that_the_settings_do_not():
    world = World()
    await world.ask(ALONE + 2, TenantId("a-stranger"))
    assert world.metric("macfabric_waiting_turns", "(other)") == 2
    assert world.metric("macfabric_waiting_turns", "a-stranger") is None
    await world.end()
