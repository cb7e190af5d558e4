"""A process that takes a dead node's port receives neither the secret nor a prompt."""

import asyncio
import ssl

import pytest

from fabric.control.node_calls import Offer, SealAgent
from fabric.keys import MEMBER_NAME, http_secret
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_http import NodeHttp, Use
from router.tls.contexts import read_router_keys
from tests.router.fake_node import CLUSTER_KEY
from tests.support.keys import make_keys

pytestmark = pytest.mark.anyio
PROMPT = "the vault code of mira is otter lantern quartz"
REQUEST = GenerateRequest(
    operation="op_12345678",
    tenant="default",
    identity=Identity(IdentityKind.CONTENT),
    sampling=Sampling(),
    prompt=PROMPT,
)
SEAL = SealAgent("default", "mira", 1, "m_12345678", "node-b")


class Impostor:
    """A listener on a dead node's port, which records what it reads."""

    def __init__(self, context=None):
        self.context = context
        self.received = b""
        self.was_dialled = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._listen, "127.0.0.1", 0, ssl=self.context)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _listen(self, reader, writer):
        self.was_dialled.set()
        while chunk := await reader.read(65536):
            self.received += chunk
            if b"\r\n\r\n" in self.received or len(self.received) > 200:
                break
        writer.close()


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "own").path


async def send_requests(keys, url, proven_as=MEMBER_NAME):
    secret = http_secret(CLUSTER_KEY)
    tls = read_router_keys(keys).node_facing() if proven_as else None
    async with NodeHttp(tls) as session:
        link = NodeLink("node-a", None, session, secret, lambda: False, proven_as=proven_as)
        link.http_url = url
        for work in (link.call(SEAL, Offer), anext(link.generate(REQUEST))):
            with pytest.raises(NodeLostError):
                await asyncio.wait_for(work, 30)
        await link.make_ready(Use.CALL, Use.STREAM)
        await asyncio.sleep(0.1)  # asyncio closes a connection that TLS ended a little later


async def test_plain_listener_on_stolen_port_learns_nothing(keys):
    async with Impostor() as impostor:
        await send_requests(keys, f"https://127.0.0.1:{impostor.port}")

    assert impostor.received, "no client connected"
    assert http_secret(CLUSTER_KEY).encode() not in impostor.received
    assert b"otter" not in impostor.received


async def test_listener_would_read_secret_without_tls(keys):
    async with Impostor() as impostor:
        await send_requests(keys, f"http://127.0.0.1:{impostor.port}", proven_as=None)

    assert http_secret(CLUSTER_KEY).encode() in impostor.received


async def test_listener_with_foreign_certificate_learns_nothing(keys, tmp_path):
    other = make_keys(tmp_path / "other").path
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other / "member.pem", other / "member.key")
    async with Impostor(context) as impostor:
        await send_requests(keys, f"https://127.0.0.1:{impostor.port}")

    assert impostor.received == b""


async def test_address_without_https_is_not_dialled(keys):
    async with Impostor() as impostor:
        await send_requests(keys, f"http://127.0.0.1:{impostor.port}")

    assert not impostor.was_dialled.is_set()
