"""Kept connections to a node: their number, their age, and the cost of a broken one."""

import asyncio

import pytest
from aiohttp import web

from fabric.control.calls import encode_call, encode_reply
from fabric.control.node_calls import Offer, SealAgent
from fabric.errors import ConflictError, FabricError
from fabric.hosting.limits import KEEP_ALIVE_S
from fabric.keys import http_secret
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_http import NodeHttp, Use
from router.limits import CONNECTION_IDLE_S
from tests.router.fake_node import CLUSTER_KEY, FakeNode
from tests.router.fleet.test_node_client import ADMITTED, FINISHED
from tests.router.rig import until

pytestmark = pytest.mark.anyio
SEAL = SealAgent("default", "kim", 3, "m-1", "node-b")
REQUEST = GenerateRequest(
    operation="op_12345678",
    tenant="default",
    identity=Identity(IdentityKind.CONTENT),
    sampling=Sampling(),
    prompt="one two three",
)


class Server(FakeNode):
    """A server that records the connection of every request."""

    def __init__(self, answer=None):
        super().__init__("node-a")
        self.peers = []  # one peer per request
        self.call_bodies = []  # the bodies of control calls
        self.answer = answer

    @property
    def open_count(self):
        connections = self._runner.server.connections if self._runner else ()
        return sum(c.transport is not None for c in connections)

    async def _http_control(self, request):
        self.peers.append(request.transport.get_extra_info("peername"))
        self.call_bodies.append(await request.read())
        if self.answer is not None:
            return await self.answer(self, request)
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    async def _opened(self, request):
        self.peers.append(request.transport.get_extra_info("peername"))
        return await super()._opened(request)

    async def _generate(self, request):
        self.peers.append(request.transport.get_extra_info("peername"))
        return await super()._generate(request)


class Linked:
    def __init__(self, node):
        self.node = node

    async def __aenter__(self):
        await self.node.start()
        self.http = NodeHttp()
        secret = http_secret(CLUSTER_KEY)
        self.link = NodeLink("node-a", self.node, self.http, secret, lambda: False)
        self.link.http_url = self.node.http_url
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.node.stop()

    async def seal(self):
        return await self.link.call(SEAL, Offer)

    async def turn(self):
        return [event async for event in self.link.generate(REQUEST)]


async def test_calls_and_turns_reuse_one_connection_each():
    async with Linked(Server()) as linked:
        for _ in range(3):
            await linked.seal()
        calls, linked.node.peers = set(linked.node.peers), []
        for _ in range(3):
            await linked.turn()
            await until(lambda: not linked.http._counts)  # the end of the response has arrived
        turns = set(linked.node.peers)

        assert len(calls) == len(turns) == 1
        assert calls != turns
        await linked.http.close()
        await until(lambda: not linked.node.open_count)


async def test_call_uses_connection_opened_ahead():
    async with Linked(Server()) as linked:
        await linked.link.make_ready(Use.CALL)
        await linked.seal()

        assert len(linked.node.peers) == 2
        assert len(set(linked.node.peers)) == 1


async def test_opening_ahead_to_dead_node_is_no_error():
    async with Linked(Server()) as linked:
        await linked.node.stop()
        await linked.link.make_ready(Use.CALL)
        linked.link.http_url = ""
        await linked.link.make_ready(Use.CALL)
        assert not linked.http._counts


async def test_turn_closed_early_closes_its_connection():
    async with Linked(Server()) as linked:
        linked.node.behaviour.delay_s = 0.05
        events = linked.link.generate(REQUEST)
        await anext(events)
        await events.aclose()
        await until(lambda: linked.node.cancelled and not linked.node.open_count)

        linked.node.behaviour.delay_s = 0.0
        await linked.turn()
        assert len(set(linked.node.peers)) == 2


async def test_restarted_node_gets_each_request_once_on_a_new_connection():
    async with Linked(Server()) as linked:
        await linked.seal()
        await linked.turn()
        port = int(linked.node.http_url.rpartition(":")[2])
        await linked.node.stop()
        await linked.node.start(port)
        linked.node.peers, linked.node.call_bodies = [], []
        await linked.seal()
        await linked.turn()

        assert linked.node.call_bodies == [encode_call(SEAL)]
        assert len(linked.node.peers) == 2


def closing(times):
    """A server that closes the connection at the second call, and after it."""

    async def answer(node, request):
        if 2 <= len(node.call_bodies) < 2 + times:
            request.transport.abort()
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    return answer


async def test_call_on_broken_kept_connection_is_retried_on_a_new_one():
    async with Linked(Server(closing(times=1))) as linked:
        await linked.seal()
        assert await linked.seal() == Offer(b"", b"", ())

        first, second, third = linked.node.peers
        assert first == second != third


async def test_broken_new_connection_raises_node_lost():
    async with Linked(Server(closing(times=9))) as linked:
        await linked.seal()
        with pytest.raises(NodeLostError):
            await linked.seal()

        assert len(linked.node.call_bodies) == 3
        assert not linked.http._counts


async def test_broken_first_connection_is_not_retried():
    async def answer(node, request):
        request.transport.abort()
        return web.Response()

    async with Linked(Server(answer)) as linked:
        with pytest.raises(NodeLostError):
            await linked.seal()

        assert len(linked.node.call_bodies) == 1


async def test_only_one_stale_connection_is_tried():
    both = asyncio.Event()

    async def answer(node, request):
        if len(node.call_bodies) == 2:
            both.set()
        await both.wait()
        if 2 < len(node.call_bodies) < 4:
            request.transport.abort()
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    async with Linked(Server(answer)) as linked:
        await asyncio.gather(linked.seal(), linked.seal())
        kept, linked.node.peers = set(linked.node.peers), []
        assert len(kept) == 2
        await linked.seal()

        stale, fresh = linked.node.peers
        assert stale in kept
        assert fresh not in kept


async def test_redirects_are_not_followed():
    async def answer(node, request):
        raise web.HTTPTemporaryRedirect(f"{node.http_url}/elsewhere")

    async def elsewhere(request):
        paths.append(request.path)
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    paths = []
    server = Server(answer)
    server.more_routes["/elsewhere"] = elsewhere
    async with Linked(server) as linked:
        with pytest.raises(FabricError):
            await linked.seal()

        assert paths == []


async def test_call_is_not_retried_after_response_has_started():
    async def answer(node, request):
        if len(node.call_bodies) == 1:
            return web.Response(body=encode_reply(Offer(b"", b"", ())))
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.abort()
        return response

    async with Linked(Server(answer)) as linked:
        await linked.seal()
        with pytest.raises(NodeLostError):
            await linked.seal()

        assert len(linked.node.call_bodies) == 2


async def test_long_body_is_resent_whole_on_retry():
    prompt = "word " * 400_000

    class AbortingServer(Server):
        async def _generate(self, request):
            if len(self.peers) == 1:
                self.peers.append(None)
                request.transport.abort()
            return await super()._generate(request)

    async with Linked(AbortingServer()) as linked:
        await linked.turn()
        await until(lambda: not linked.http._counts)
        long = GenerateRequest(
            operation="op_12345679",
            tenant="default",
            identity=Identity(IdentityKind.CONTENT),
            sampling=Sampling(max_tokens=1),
            prompt=prompt,
        )
        events = [event async for event in linked.link.generate(long)]

        assert linked.node.requests[-1].prompt == prompt
        assert events[-1].completion_tokens == 1


async def test_error_response_keeps_connection():
    async with Linked(Server()) as linked:
        linked.node.behaviour.refuse = ConflictError("no")
        for _ in range(3):
            with pytest.raises(ConflictError):
                await linked.turn()

        assert len(set(linked.node.peers)) == 1


async def test_expired_connection_is_not_reused(monkeypatch):
    monkeypatch.setattr("router.fleet.node_http.CONNECTION_LIFE_S", 0.0)
    async with Linked(Server()) as linked:
        for _ in range(3):
            await linked.seal()

        assert len(set(linked.node.peers)) == 3
        await until(lambda: linked.node.open_count == 1)


async def test_router_closes_idle_connection_before_node_does(monkeypatch):
    assert CONNECTION_IDLE_S < KEEP_ALIVE_S - 5
    monkeypatch.setattr("router.fleet.node_http.CONNECTION_IDLE_S", 0.05)
    async with Linked(Server()) as linked:
        await linked.seal()
        await until(lambda: not linked.node.open_count)


@pytest.mark.parametrize("use", list(Use))
async def test_kept_connections_are_bounded(use):
    more = 9
    begun, together = 0, asyncio.Event()

    async def all_at_once(*_):
        nonlocal begun
        begun += 1
        if begun == use.value + more:
            together.set()
        await together.wait()
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    class Gathering(Server):
        async def _generate(self, request):
            await all_at_once()
            return await super()._generate(request)

    async with Linked(Gathering(all_at_once)) as linked:
        work = linked.seal if use is Use.CALL else linked.turn
        await asyncio.gather(*(work() for _ in range(use.value + more)))

        await until(lambda: linked.node.open_count == use.value)
        assert not linked.http._counts


async def test_unanswered_turns_per_node_are_bounded(monkeypatch):
    """The others wait in the router, as a node drops excess connections."""
    monkeypatch.setattr("router.fleet.node_http.TURNS_UNANSWERED_MAX", 3)
    waiting, most = 0, 0

    class Counting(Server):
        async def _generate(self, request):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0.01)
            waiting -= 1
            return await super()._generate(request)

    async with Linked(Counting()) as linked:
        turns = await asyncio.gather(*(linked.turn() for _ in range(12)))
    assert all(turns)
    assert most == 3


async def test_response_without_end_is_dropped_after_limit(monkeypatch):
    monkeypatch.setattr("router.fleet.node_http.END_WAIT_S", 0.05)

    class Endless(Server):
        async def _generate(self, request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(ADMITTED + FINISHED)
            await asyncio.sleep(60)
            return response

    async with Linked(Endless()) as linked:
        assert len(await linked.turn()) == 2
        await until(lambda: not linked.node.open_count and not linked.http._counts)


async def test_cancelled_request_releases_its_connection():
    async with Linked(Server()) as linked:
        linked.node.behaviour.hang = True
        for moment_s in (0.0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.05):
            asking = asyncio.create_task(linked.turn())
            await asyncio.sleep(moment_s)
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: not linked.node.open_count)

        assert not linked.http._counts
        assert not linked.http._answers
