"""The router's kept connections to a real node: strangers displace none, a stop closes all."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from fabric.control.node_calls import Offer, SealAgent
from fabric.errors import FabricError
from fabric.hosting import guarded_connection
from fabric.hosting.connection_table import ConnectionSlots
from fabric.keys import MEMBER_NAME, http_secret
from node.keys import read_keys
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_http import NodeHttp, Use
from router.tls.contexts import read_router_keys
from tests.router.rig import until
from tests.support.keys import make_keys
from tests.support.services import start_service
from tests.support.tiny_models import ONE_LAYER, write_model

pytestmark = pytest.mark.anyio
SEAL = SealAgent("default", "nobody", 3, "m-1", "node-b")
FEW = ConnectionSlots(12, 8, admitted=6)


class Linked:
    """A real node behind TLS, and the router's link to it."""

    def __init__(self, folder):
        self.keys = make_keys(folder / "keys").path
        self.model = write_model(folder / "model", ONE_LAYER)
        self.folder = folder / "node"

    @asynccontextmanager
    async def node(self):
        node_keys = read_keys(self.keys)
        key, tls = node_keys.cluster_key, node_keys.server_context()
        service = await asyncio.to_thread(
            start_service, self.folder, self.model, cluster_key=key, tls=tls
        )
        try:
            yield service
        finally:  # in a thread: the router's loop must run to notice that a connection ends
            await asyncio.to_thread(service.stop)

    async def __aenter__(self):
        self.http = NodeHttp(read_router_keys(self.keys).node_facing())
        secret = http_secret(read_keys(self.keys).cluster_key)
        self.link = NodeLink(
            "node-a", None, self.http, secret, lambda: False, proven_as=MEMBER_NAME
        )
        return self

    async def __aexit__(self, *_):
        await self.http.close()

    @property
    def opened(self):
        return list(self.http._kept[Use.CALL].connector._opened_s)

    async def seal(self):
        with pytest.raises(FabricError) as caught:
            await self.link.call(SEAL, Offer)
        assert caught.value.code == "agent_not_found", "the node handled the call"


def has_ended(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_strangers_do_not_displace_kept_connections(tmp_path, monkeypatch):
    monkeypatch.setattr("node.http.routes.SLOTS", FEW)
    monkeypatch.setattr(guarded_connection, "SWEEP_S", 0.05)
    monkeypatch.setattr(guarded_connection, "HEAD_S", 0.2)
    async with Linked(tmp_path) as linked, linked.node() as service:
        linked.link.http_url = service.node.resources.endpoint.url
        await linked.link.make_ready(Use.CALL)
        first = linked.opened
        host, port = service.node.resources.endpoint.url.removeprefix("https://").split(":")
        strangers = [socket.create_connection((host, int(port)), 60) for _ in range(40)]
        try:
            await until(lambda: sum(map(has_ended, strangers)) >= 32)
            await linked.seal()
        finally:
            for each in strangers:
                each.close()
        assert len(first) == 1
        assert linked.opened == first


async def test_stopping_node_closes_kept_connections_and_successor_is_reached(tmp_path):
    async with Linked(tmp_path) as linked:
        async with linked.node() as service:
            linked.link.http_url = service.node.resources.endpoint.url
            await linked.seal()
            (kept,) = linked.opened
        await until(lambda: not kept.is_connected())
        with pytest.raises(NodeLostError):
            await linked.link.call(SEAL, Offer)
        async with linked.node() as service:
            linked.link.http_url = service.node.resources.endpoint.url
            await linked.seal()
