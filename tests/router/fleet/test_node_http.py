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
from router.fleet.node_client import HttpNodeLink, NodeLostError
from router.fleet.node_http import NodeHttp, Use
from router.limits import KEPT_IDLE_S
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
        self.came = []  # one peer per request
        self.asked = []  # the bodies of control calls
        self.answer = answer

    @property
    def open_count(self):
        connections = self._runner.server.connections if self._runner else ()
        return sum(c.transport is not None for c in connections)

    async def _hasty(self, request):
        self.came.append(request.transport.get_extra_info("peername"))
        self.asked.append(await request.read())
        if self.answer is not None:
            return await self.answer(self, request)
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    async def _opened(self, request):
        self.came.append(request.transport.get_extra_info("peername"))
        return await super()._opened(request)

    async def _generate(self, request):
        self.came.append(request.transport.get_extra_info("peername"))
        return await super()._generate(request)


class Linked:
    def __init__(self, node):
        self.node = node

    async def __aenter__(self):
        await self.node.start()
        self.http = NodeHttp()
        secret = http_secret(CLUSTER_KEY)
        self.link = HttpNodeLink("node-a", self.node, self.http, secret, lambda: False)
        self.link.http_url = self.node.http_url
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.node.stop()

    async def seal(self):
        return await self.link.call(SEAL, Offer)

    async def turn(self):
        return [event async for event in self.link.generate(REQUEST)]


async def test_calls_and_turns_keep_one_connection_each():
    async with Linked(Server()) as linked:
        for _ in range(3):
            await linked.seal()
        calls, linked.node.came = set(linked.node.came), []
        for _ in range(3):
            await linked.turn()
            await until(lambda: not linked.http._counts)  # the answer's end has come
        turns = set(linked.node.came)

        assert len(calls) == len(turns) == 1
        assert calls != turns
        await linked.http.close()
        await until(lambda: not linked.node.open_count)


async def test_a_connection_made_ready_is_the_one_that_the_call_takes():
    async with Linked(Server()) as linked:
        await linked.link.make_ready(Use.CALL)
        await linked.seal()

        assert len(linked.node.came) == 2
        assert len(set(linked.node.came)) == 1


async def test_a_node_that_cannot_be_made_ready_is_no_error():
    async with Linked(Server()) as linked:
        await linked.node.stop()
        await linked.link.make_ready(Use.CALL)
        linked.link.http_url = ""
        await linked.link.make_ready(Use.CALL)
        assert not linked.http._counts


async def test_a_turn_that_is_closed_early_closes_its_connection():
    async with Linked(Server()) as linked:
        linked.node.does.delay_s = 0.05
        events = linked.link.generate(REQUEST)
        await anext(events)
        await events.aclose()
        await until(lambda: linked.node.cancelled and not linked.node.open_count)

        linked.node.does.delay_s = 0.0
        await linked.turn()
        assert len(set(linked.node.came)) == 2


async def test_a_node_that_restarts_at_its_address_is_asked_once_on_a_new_connection():
    async with Linked(Server()) as linked:
        await linked.seal()
        await linked.turn()
        port = int(linked.node.http_url.rpartition(":")[2])
        await linked.node.stop()
        await linked.node.start(port)
        linked.node.came, linked.node.asked = [], []
        await linked.seal()
        await linked.turn()

        assert linked.node.asked == [encode_call(SEAL)]
        assert len(linked.node.came) == 2


def closing(times):
    """A server that closes the connection at the second call, and after it."""

    async def answer(node, request):
        if 2 <= len(node.asked) < 2 + times:
            request.transport.abort()
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    return answer


async def test_a_call_on_a_kept_connection_that_breaks_is_made_once_more_on_a_new_one():
    async with Linked(Server(closing(times=1))) as linked:
        await linked.seal()
        assert await linked.seal() == Offer(b"", b"", ())

        first, second, third = linked.node.came
        assert first == second != third


async def test_a_new_connection_that_breaks_is_the_loss_of_the_node():
    async with Linked(Server(closing(times=9))) as linked:
        await linked.seal()
        with pytest.raises(NodeLostError):
            await linked.seal()

        assert len(linked.node.asked) == 3
        assert not linked.http._counts


async def test_a_first_connection_that_breaks_is_not_tried_again():
    async def answer(node, request):
        request.transport.abort()
        return web.Response()

    async with Linked(Server(answer)) as linked:
        with pytest.raises(NodeLostError):
            await linked.seal()

        assert len(linked.node.asked) == 1


async def test_of_several_kept_connections_that_are_gone_only_one_is_tried():
    both = asyncio.Event()

    async def answer(node, request):
        if len(node.asked) == 2:
            both.set()
        await both.wait()
        if 2 < len(node.asked) < 4:
            request.transport.abort()
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    async with Linked(Server(answer)) as linked:
        await asyncio.gather(linked.seal(), linked.seal())
        kept, linked.node.came = set(linked.node.came), []
        assert len(kept) == 2
        await linked.seal()

        stale, fresh = linked.node.came
        assert stale in kept
        assert fresh not in kept


async def test_redirects_of_a_node_are_not_followed():
    async def answer(node, request):
        raise web.HTTPTemporaryRedirect(f"{node.http_url}/elsewhere")

    async def elsewhere(request):
        came.append(request.path)
        return web.Response(body=encode_reply(Offer(b"", b"", ())))

    came = []
    server = Server(answer)
    server.more_routes["/elsewhere"] = elsewhere
    async with Linked(server) as linked:
        with pytest.raises(FabricError):
            await linked.seal()

        assert came == []


async def test_an_answer_that_has_begun_is_not_asked_for_again():
    async def answer(node, request):
        if len(node.asked) == 1:
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

        assert len(linked.node.asked) == 2


async def test_a_long_body_is_sent_whole_the_second_time():
    prompt = "word " * 400_000

    class Deaf(Server):
        async def _generate(self, request):
            if len(self.came) == 1:
                self.came.append(None)
                request.transport.abort()
            return await super()._generate(request)

    async with Linked(Deaf()) as linked:
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


async def test_a_refusal_keeps_the_connection():
    async with Linked(Server()) as linked:
        linked.node.does.refuse = ConflictError("no")
        for _ in range(3):
            with pytest.raises(ConflictError):
                await linked.turn()

        assert len(set(linked.node.came)) == 1


async def test_no_request_begins_on_a_connection_that_is_too_old(monkeypatch):
    monkeypatch.setattr("router.fleet.node_http.KEPT_LIFE_S", 0.0)
    async with Linked(Server()) as linked:
        for _ in range(3):
            await linked.seal()

        assert len(set(linked.node.came)) == 3
        await until(lambda: linked.node.open_count == 1)


async def test_an_idle_connection_is_closed_by_the_router_and_before_the_node_does(monkeypatch):
    assert KEPT_IDLE_S < KEEP_ALIVE_S - 5
    monkeypatch.setattr("router.fleet.node_http.KEPT_IDLE_S", 0.05)
    async with Linked(Server()) as linked:
        await linked.seal()
        await until(lambda: not linked.node.open_count)


@pytest.mark.parametrize("use", list(Use))
async def test_only_so_many_are_kept(use):
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


async def test_only_so_many_turns_of_a_node_are_unanswered_at_a_time(monkeypatch):
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


async def test_an_answer_without_an_end_is_not_waited_for_long(monkeypatch):
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


async def test_a_cancelled_request_leaves_no_connection_in_use():
    async with Linked(Server()) as linked:
        linked.node.does.hang = True
        for moment_s in (0.0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.05):
            asking = asyncio.create_task(linked.turn())
            await asyncio.sleep(moment_s)
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: not linked.node.open_count)

        assert not linked.http._counts
        assert not linked.http._answers
