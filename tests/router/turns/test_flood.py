"""Hundreds of concurrent turns: 429 in each dialect, no tenant starved, no turn lost."""

import asyncio
from collections import Counter

import httpx2
import pytest

from fabric.settings import RouterSettings
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import KEY, OPERATOR_KEY, OTHER_KEY, rig, until

pytestmark = pytest.mark.anyio
TENANTS = {"one": KEY, "two": OTHER_KEY}
OPERATOR = {"x-macfabric-operator-key": OPERATOR_KEY}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
UNLIMITED = httpx2.Limits(max_connections=None)
REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "hi", "store": False},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/messages": CHAT,
    "/v1/agents/alice/generate": {"text": "hi"},
}


class SlowNode(FakeNode):
    """A node that admits a few turns at a time, in order of arrival."""

    def __init__(self, name, at_once=2):
        super().__init__(name)
        self.at_once = asyncio.Semaphore(at_once)
        self.is_open = asyncio.Event()
        self.waiting_max = self.waiting_count = 0

    async def _wait_for_move(self, turn):
        self.waiting_count += 1
        self.waiting_max = max(self.waiting_max, self.waiting_count)
        try:
            await self.is_open.wait()
            async with self.at_once:
                await asyncio.sleep(0)
        finally:
            self.waiting_count -= 1


class Flood:
    """Turns of tenants, in order of their answers; few connect at once: the backlog is short."""

    def __init__(self, fabric):
        self._fabric = fabric
        self._clients = {name: fabric.http(key, limits=UNLIMITED) for name, key in TENANTS.items()}
        self._tasks = []
        self.order = []  # tenants of answered turns, or error statuses

    async def ask(self, tenant, count):
        """Send `count` turns; return once the router has all of them."""
        for number in range(count):
            self._tasks.append(asyncio.create_task(self._one(tenant, number)))
            if number % 30 == 29 or number == count - 1:
                await until(lambda: self._received_count() == len(self._tasks))

    def _received_count(self):
        return len(self._fabric.services.turns.running) + len(self.order)

    async def _one(self, tenant, number):
        answer = await self._fabric.chat(f"{tenant} {number}", http=self._clients[tenant])
        self.order.append(tenant if answer.status_code == 200 else str(answer.status_code))

    async def end(self):
        await asyncio.gather(*self._tasks)


def flooded_rig(nodes, **more):
    settings = RouterSettings(
        takeover_after_s=20.0, api_keys=TENANTS, loopback_without_key=False, **more
    )
    return rig(nodes=nodes, settings=settings)


async def test_a_full_queue_is_a_429_in_every_dialect():
    nodes = [SlowNode("node-a")]
    async with flooded_rig(nodes, queue_max=2) as fabric:
        http = fabric.http(KEY)
        asking = [asyncio.create_task(fabric.chat("hi", http=http)) for _ in range(33)]
        await until(lambda: fabric.services.turns.queues.waiting_count("node-a") == 1)
        refused = {path: await http.post(path, json=body) for path, body in REQUESTS.items()}
        nodes[0].is_open.set()
        answers = await asyncio.gather(*asking)

    assert {answer.status_code for answer in answers} == {200}
    for path, answer in refused.items():
        assert answer.status_code == 429, (path, answer.text)
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert "Retry-After" in error["message"]
        if path == "/v1/messages":
            assert (answer.json()["type"], error["type"]) == ("error", "rate_limit_error")
        else:
            assert error["code"] == "overloaded"


async def test_a_stream_is_refused_before_it_begins():
    nodes = [SlowNode("node-a")]
    async with flooded_rig(nodes, queue_max=2) as fabric:
        http = fabric.http(KEY)
        asking = [asyncio.create_task(fabric.chat("hi", http=http)) for _ in range(33)]
        await until(lambda: fabric.services.turns.queues.waiting_count("node-a") == 1)
        refused = await fabric.chat("hi", http=http, stream=True)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        nodes[0].is_open.set()
        await asyncio.gather(*asking)


async def test_a_flood_of_one_tenant_delays_another_by_turns_already_sent():
    """The delay is counted in admitted turns, not in seconds."""
    nodes = [SlowNode("node-a", at_once=1)]
    async with flooded_rig(nodes) as fabric:
        flood = Flood(fabric)
        await flood.ask("one", 300)
        assert fabric.services.turns.queues.waiting_count("node-a") == 128
        await flood.ask("two", 20)
        await until(lambda: sum(each.tenant == "two" for each in nodes[0].requests) == 20)
        nodes[0].is_open.set()
        await flood.end()
        metrics = (await fabric.http(operates=False).get("/metrics", headers=OPERATOR)).text

    counts = Counter(flood.order)
    assert counts == {"one": 160, "two": 20, "429": 140}
    served = [each for each in flood.order if each != "429"]
    assert max(at for at, tenant in enumerate(served) if tenant == "two") < 32 + 20 + 20
    assert nodes[0].waiting_max <= 64
    assert 'macfabric_refused_turns_total{tenant="one"} 140.0' in metrics
    assert 'macfabric_waiting_turns{tenant="one"} 0.0' in metrics
    assert "macfabric_expired_leases_total 0.0" in metrics


async def test_two_tenants_that_flood_are_served_alike():
    nodes = [SlowNode("node-a", at_once=1)]
    async with flooded_rig(nodes) as fabric:
        flood = Flood(fabric)
        await flood.ask("one", 120)
        await flood.ask("two", 80)
        assert fabric.services.turns.queues.waiting_count("node-a") >= 130
        nodes[0].is_open.set()
        await flood.end()

    counts = Counter(flood.order[32:112])  # after the first tenant's head start
    assert abs(counts["one"] - counts["two"]) <= 16, counts


async def test_two_tenants_that_flood_are_served_by_weight():
    """Shares are counted in turns in the order of admission; nodes get the weights, too."""
    nodes = [SlowNode("node-a", at_once=1)]
    async with flooded_rig(nodes, tenant_weights={"one": 3.0}) as fabric:
        flood = Flood(fabric)
        await flood.ask("one", 150)
        alone_count = len(nodes[0].requests)
        await flood.ask("two", 80)
        nodes[0].is_open.set()
        await flood.end()

    assert {each.tenant: each.weight for each in nodes[0].requests} == {"one": 3.0, "two": 1.0}
    granted = Counter(each.tenant for each in nodes[0].requests[alone_count:][:100])
    assert 72 <= granted["one"] <= 78, granted


async def test_turns_that_wait_for_a_node_that_is_lost_are_served_by_another():
    nodes = [SlowNode("node-a"), SlowNode("node-b")]
    async with flooded_rig(nodes) as fabric:
        flood = Flood(fabric)
        await flood.ask("one", 120)
        waiting = fabric.services.turns.queues.waiting_count
        await until(lambda: waiting("node-a") + waiting("node-b") == 56)
        await nodes[0].stop()
        nodes[1].is_open.set()
        await flood.end()

    assert Counter(flood.order) == {"one": 120}
