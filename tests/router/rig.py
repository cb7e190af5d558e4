"""A whole router over fake nodes, in one event loop, with real sockets in between."""

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import anthropic
import httpx2
import openai
import uvicorn

from fabric.control import calls
from fabric.keys import OPERATOR_HEADER, http_secret
from fabric.limits import HEARTBEAT_S
from fabric.settings import RouterSettings
from router.app import build_app
from router.fleet.fleet import NodeAccess
from router.fleet.node_client import NodeLink
from router.fleet.node_http import NodeHttp
from router.serve import http_config
from router.services import assemble
from tests.router.fake_node import CLUSTER_KEY, MODEL, FakeNode
from tests.support.clocks import ScaledClock
from tests.support.documented import Documented

KEY = "key-of-tenant-one"
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loading certificates takes long
OTHER_KEY = "key-of-tenant-two"
OPERATOR_KEY = "key-of-an-operator"


SLOW = 0.05  # scale of a clock by which a lease lasts two minutes
SOON = RouterSettings(takeover_after_s=0.3)


def shorten(monkeypatch, message, timeout_s):
    """Shorten the reply timeout of one class of calls."""
    spec = replace(calls.spec_of(message), timeout_s=timeout_s)
    monkeypatch.setitem(calls._BY_MESSAGE, message, spec)


class Rig:
    """A router over fake nodes, with everything that tests inspect."""

    def __init__(self, nodes, fleet, services, app, url):
        self.nodes = {node.name: node for node in nodes}
        self.listed = {}  # the nodes that Ray lists
        self.fleet = fleet
        self.services = services
        self.app = app
        self.url = url
        self.server = None
        self.tending = None
        self._clients = []
        self.writers = []  # of raw connections, closed even if a test fails

    def __getitem__(self, name):
        return self.nodes[name]

    def openai(self, key="unused", **options):
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=60,
            http_client=httpx2.AsyncClient(verify=_NO_TLS, timeout=60),
            **options,
        )
        self._clients.append(client)
        return client

    def anthropic(self, key="unused", **options):
        client = anthropic.AsyncAnthropic(
            base_url=self.url,
            api_key=key,
            max_retries=0,
            timeout=60,
            http_client=httpx2.AsyncClient(verify=_NO_TLS, timeout=60),
            **options,
        )
        self._clients.append(client)
        return client

    def http(self, key=None, *, operates=True, **options):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= {OPERATOR_HEADER: OPERATOR_KEY} if operates else {}
        client = httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=60, verify=_NO_TLS, **options
        )
        self._clients.append(client)
        return client

    async def chat(self, *contents, agent=None, http=None, **body):
        """Send one chat by plain HTTP; contents alternate user and assistant."""
        roles = ["user", "assistant"]
        messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
        headers = {"x-agent-id": agent} if agent else {}
        client = http or self.http()
        body = {"model": MODEL, "messages": messages, **body}
        return await client.post("/v1/chat/completions", json=body, headers=headers)

    async def close(self):
        for writer in self.writers:
            writer.close()
        for client in self._clients:
            await (client.close() if hasattr(client, "close") else client.aclose())


@asynccontextmanager
async def rig(
    names="abc",
    *,
    settings=None,
    scale=None,
    nodes=None,
    started=True,
    tended=True,
    placement=None,
    slots=None,
    runs_dir=None,
    roster_store=None,
    expected=None,
    watch_key=None,
):
    """Start fake nodes called node-a, … and a router over them."""
    nodes = nodes or [FakeNode(f"node-{letter}") for letter in names]
    # Without heartbeats, a lease must outlast the test on the slowest machine.
    scale = scale or (1.0 if tended else SLOW)
    # Unless a test sets a limit, no agent is taken over because this machine is busy.
    settings = settings or RouterSettings(takeover_after_s=20.0)
    settings = replace(settings, operator_keys={"ops": OPERATOR_KEY})
    for node in nodes:
        await node.start()
    listed = {node.name: node for node in nodes}
    async with NodeHttp() as session:

        async def roster():
            return listed

        def connect(name, transport, is_lost):
            return NodeLink(name, transport, session, http_secret(CLUSTER_KEY), is_lost)

        access = NodeAccess(roster, connect, ScaledClock(scale), HEARTBEAT_S / scale)
        services = assemble(access, settings, CLUSTER_KEY, placement, expected, roster_store)
        fleet = services.fleet
        app = build_app(settings, services, runs_dir, watch_key=watch_key)
        listener = socket.create_server(("127.0.0.1", 0))
        documented = Documented(app)
        config = http_config(documented, slots)
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn offers no event for it
            await asyncio.sleep(0.005)
        fabric = Rig(nodes, fleet, services, app, f"http://127.0.0.1:{listener.getsockname()[1]}")
        fabric.server = server
        fabric.listed = listed
        if started:
            await fleet.membership.discover()
            await fleet.membership.refresh()
        resuming = asyncio.create_task(app.state.runs.resume_all())
        if tended:
            fabric.tending = asyncio.create_task(services.run())
        try:
            yield fabric
        finally:
            await fabric.close()
            resuming.cancel()
            await app.state.runs.close()
            await _stop(server, serving)
            if fabric.tending:
                fabric.tending.cancel()
                await asyncio.gather(fabric.tending, return_exceptions=True)
            await fleet.membership.close()
            for node in nodes:
                await node.stop()
        assert not documented.wrong, f"not as the OpenAPI document: {documented.wrong}"


async def _stop(server, serving):
    """Stop uvicorn without its grace periods for clients."""
    for each in server.servers:
        each.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(0)
    tasks = list(server.server_state.tasks)
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def until(condition, timeout_s=60.0):
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a test's condition may be anything
            await asyncio.sleep(0.01)
