import asyncio
import time

import pytest
from aiohttp import web

from fabric.control.calls import (
    NO_ORIGIN,
    NODE_HEADER,
    CallOrigin,
    ErrorReply,
    encode_call,
    encode_reply,
)
from fabric.control.node_calls import Describe, Done, Flush, NodeView, Offer, SealAgent
from fabric.errors import (
    ConflictError,
    FabricError,
    OverloadedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.hosting.turn_context import about_turn
from fabric.ids import TurnId
from fabric.keys import http_secret
from fabric.turn.generation import Admitted, GenerateRequest, Identity, IdentityKind, Sampling
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_http import NodeHttp, Use
from tests.router.fake_node import CLUSTER_KEY, FakeNode
from tests.router.rig import until

pytestmark = pytest.mark.anyio
REQUEST = GenerateRequest(
    operation="op_12345678",
    tenant="default",
    identity=Identity(IdentityKind.CONTENT),
    sampling=Sampling(),
    prompt="one two three",
)


class Linked:
    """A link to a fake node, or to any other HTTP server."""

    def __init__(self, node, secret=None):
        self.node = node
        self.is_lost = False
        self.secret = secret or http_secret(CLUSTER_KEY)

    async def __aenter__(self):
        await self.node.start()
        self.session = NodeHttp()
        self.link = NodeLink("node-a", self.node, self.session, self.secret, lambda: self.is_lost)
        self.link.http_url = self.node.http_url
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.node.stop()

    async def events(self):
        return [event async for event in self.link.generate(REQUEST)]


class Server(FakeNode):
    """A server that answers with raw chunks."""

    def __init__(self, *chunks, pause_s=0.0):
        super().__init__("node-a")
        self.chunks, self.pause_s = chunks, pause_s

    async def _generate(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
            await asyncio.sleep(self.pause_s)
        return response


ADMITTED = (
    b'{"agent":"x","node":"node-a","epoch":1,"cache":"cold","match":"none",'
    b'"prompt_tokens":1,"cached_tokens":0,"match_reason":"","event":"admitted"}\n'
)
FINISHED = b'{"reason":"stop","completion_tokens":1,"event":"finished"}\n'


async def test_link_streams_events():
    async with Linked(FakeNode("node-a")) as linked:
        events = await linked.events()

    assert isinstance(events[0], Admitted)
    assert "".join(e.text for e in events[1:-1]) == "one two three "
    assert events[-1].completion_tokens == 3


async def test_turn_uses_connection_opened_ahead():
    async with Linked(FakeNode("node-a")) as linked:
        await linked.link.make_ready(Use.STREAM)
        await linked.events()

    assert [linked.node.ports["turn"]] == linked.node.opened


async def test_event_lines_are_reassembled_across_chunks_and_pauses(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.WATCH_S", 0.01)
    whole = ADMITTED + b"\n" + FINISHED
    pieces = [whole[i : i + 37] for i in range(0, len(whole), 37)]
    async with Linked(Server(*pieces, pause_s=0.02)) as linked:
        events = await linked.events()

    assert len(events) == 2


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ((), NodeLostError),
        ((ADMITTED,), NodeLostError),
        ((ADMITTED, FINISHED[:-5]), NodeLostError),
        ((b"x" * (3 << 20),), FabricError),
        ((b"[1]\n",), FabricError),
        ((b'{"event":"finished"}\n',), FabricError),
    ],
)
async def test_broken_stream_raises_matching_error(chunks, kind):
    async with Linked(Server(*chunks)) as linked:
        with pytest.raises(FabricError) as caught:
            await linked.events()

    assert type(caught.value) is kind


async def test_refused_connection_raises_node_lost():
    async with Linked(FakeNode("node-a")) as linked:
        await linked.node.stop()
        with pytest.raises(NodeLostError):
            await linked.events()
        linked.link.http_url = ""
        with pytest.raises(NodeLostError):
            await linked.events()


async def test_wrong_cluster_secret_is_a_500():
    async with Linked(FakeNode("node-a"), secret="wrong") as linked:
        with pytest.raises(FabricError) as caught:
            await linked.events()

    assert caught.value.status == 500
    assert caught.value.code == "cluster_secret_refused"


async def test_closing_stream_cancels_turn_on_node():
    node = FakeNode("node-a")
    node.behaviour.delay_s = 0.05
    async with Linked(node) as linked:
        events = linked.link.generate(REQUEST)
        await anext(events)
        await events.aclose()
        await until(lambda: node.cancelled)


@pytest.mark.parametrize("moment", ["headers", "body", "control"])
async def test_expired_lease_interrupts_any_wait(moment, monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.WATCH_S", 0.02)
    node = Server(ADMITTED, pause_s=60.0) if moment == "body" else FakeNode("node-a")
    node.behaviour.hang = moment != "body"
    control = moment == "control"
    async with Linked(node) as linked:
        started_s = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, setattr, linked, "is_lost", True)
        with pytest.raises(NodeLostError):
            await (linked.link.call(Flush(), Done) if control else linked.events())

    assert time.monotonic() - started_s < 30


async def test_events_that_arrived_before_the_loss_are_read(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.WATCH_S", 0.02)
    async with Linked(Server(ADMITTED + FINISHED[:20], FINISHED[20:], pause_s=0.05)) as linked:
        events = linked.link.generate(REQUEST)
        assert isinstance(await anext(events), Admitted)
        linked.is_lost = True
        await asyncio.sleep(0.3)  # the reader is slow: nothing waits for the node
        assert (await anext(events)).completion_tokens == 1


async def test_stream_that_flows_survives_an_expired_lease(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.WATCH_S", 0.5)
    whole = ADMITTED + FINISHED
    pieces = [whole[i : i + 16] for i in range(0, len(whole), 16)]
    async with Linked(Server(*pieces, pause_s=0.1)) as linked:
        events = linked.link.generate(REQUEST)
        assert isinstance(await anext(events), Admitted)
        linked.is_lost = True
        assert (await anext(events)).completion_tokens == 1


async def test_control_call_times_out():
    node = FakeNode("node-a")
    node.behaviour.hang = True
    async with Linked(node) as linked:
        with pytest.raises(NodeLostError) as caught:
            await linked.link.call(Describe(), NodeView, timeout_s=0.05)

    assert caught.value.code == "node_timeout"


ERRORS = [
    (ErrorReply(409, "busy", "x"), ConflictError),
    (ErrorReply(421, "not_owner", "x"), RetryElsewhereError),
    (ErrorReply(421, "stale_epoch", "x"), StaleEpochError),
    (ErrorReply(429, "overloaded", "x", 2.5), OverloadedError),
    (ErrorReply(503, "loading", "x", 0.5), RetryLaterError),
    (ErrorReply(500, "corrupt_data", "x"), FabricError),
]


@pytest.mark.parametrize(("reply", "kind"), ERRORS)
async def test_control_call_errors_keep_their_class(reply, kind):
    async with Linked(FakeNode("node-a")) as linked:
        linked.node._handlers[Describe] = lambda _: reply
        with pytest.raises(FabricError) as caught:
            await linked.link.call(Describe(), NodeView)

    assert type(caught.value) is kind
    assert caught.value.code == reply.code
    if reply.retry_after_s:
        assert caught.value.retry_after_s == reply.retry_after_s


@pytest.mark.parametrize("raw", [b"", b"\xff", encode_reply(Flush())])
async def test_invalid_control_reply_is_a_500(raw):
    async def transport(_raw):
        return raw

    async with Linked(FakeNode("node-a")) as linked:
        linked.link._transport = transport
        with pytest.raises(FabricError) as caught:
            await linked.link.call(Describe(), NodeView)

    assert caught.value.status == 500
    assert caught.value.code == "bad_node_answer"


SEAL = SealAgent("default", "kim", 3, "m-1", "node-b")


def sealing(answer):
    """A node that answers control calls over HTTP only."""
    node = FakeNode("node-a")
    node._http_control = answer
    by_ray = ConflictError("asked by Ray")
    node.behaviour.fail = {"describe": by_ray, "seal_agent": by_ray}
    return node


async def test_only_urgent_calls_use_http():
    async def answer(request):
        assert request.headers[NODE_HEADER] == "node-a"
        return web.Response(body=encode_reply(Offer(await request.read(), b"", ())))

    async with Linked(sealing(answer)) as linked:
        offer = await linked.link.call(SEAL, Offer)
        with pytest.raises(ConflictError, match="by Ray"):
            await linked.link.call(Describe(), NodeView)
        linked.link.http_url = ""  # not known yet
        with pytest.raises(ConflictError, match="by Ray"):
            await linked.link.call(SEAL, Offer)

    assert offer.manifest == encode_call(SEAL)


@pytest.mark.parametrize("reads", [True, False])
async def test_calls_name_their_turn_to_nodes_that_read_it(reads):
    async def answer(request):
        return web.Response(body=encode_reply(Offer(await request.read(), b"", ())))

    async with Linked(sealing(answer)) as linked:
        linked.link.reads_origins = reads
        with about_turn(TurnId("turn-of-a-client")):
            offer = await linked.link.call(SEAL, Offer)

    expected = CallOrigin(turn=TurnId("turn-of-a-client")) if reads else NO_ORIGIN
    assert offer.manifest == encode_call(SEAL, origin=expected)


@pytest.mark.parametrize("moment", ["before", "within"])
async def test_interrupted_urgent_call_is_not_repeated(moment):
    bodies = []

    async def answer(request):
        bodies.append(await request.read())
        response = web.StreamResponse(headers={"content-length": "100"})
        if moment == "within":
            await response.prepare(request)
            await response.write(b"half")
        request.transport.abort()
        return response

    async with Linked(sealing(answer)) as linked:
        with pytest.raises(NodeLostError):
            await linked.link.call(SEAL, Offer)

    assert bodies == [encode_call(SEAL)]


async def test_urgent_call_reply_is_bounded(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.CONTROL_BYTES_MAX", 1_000)

    async def answer(_):
        return web.Response(body=bytes(2_000))

    async with Linked(sealing(answer)) as linked:
        with pytest.raises(FabricError, match="over 1000 bytes") as caught:
            await linked.link.call(SEAL, Offer)

    assert caught.value.code == "bad_node_answer"


async def test_urgent_call_ends_when_lease_expires(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.WATCH_S", 0.02)
    arrived, never = asyncio.Event(), asyncio.Event()

    async def answer(_):
        arrived.set()
        await never.wait()

    async with Linked(sealing(answer)) as linked:
        sealed = asyncio.create_task(linked.link.call(SEAL, Offer))
        await arrived.wait()
        linked.is_lost = True
        with pytest.raises(NodeLostError, match="silent"):
            await sealed


async def test_reply_of_another_node_at_the_address_is_rejected():
    async def answer(_):
        error = {"status": 421, "code": "wrong_node", "message": "another node"}
        return web.json_response({"error": error}, status=421)

    async with Linked(sealing(answer)) as linked:
        with pytest.raises(RetryElsewhereError, match="another node"):
            await linked.link.call(SEAL, Offer)
