"""A process that takes a dead node's port learns neither the secret nor a prompt."""

import asyncio
import ssl

import pytest

from fabric.control.node_calls import Offer, SealAgent
from fabric.keys import MEMBER_NAME, http_secret
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from router.fleet.node_client import HttpNodeLink, NodeLostError
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
        self.heard = b""
        self.came = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._listen, "127.0.0.1", 0, ssl=self.context)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _listen(self, reader, writer):
        self.came.set()
        while chunk := await reader.read(65536):
            self.heard += chunk
            if b"\r\n\r\n" in self.heard or len(self.heard) > 200:
                break
        writer.close()


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "own").path


async def tell_everything(keys, url, proven_as=MEMBER_NAME):
    secret = http_secret(CLUSTER_KEY)
    tls = read_router_keys(keys).node_facing() if proven_as else None
    async with NodeHttp(tls) as session:
        link = HttpNodeLink("node-a", None, session, secret, lambda: False, proven_as=proven_as)
        link.http_url = url
        for work in (link.call(SEAL, Offer), anext(link.generate(REQUEST))):
            with pytest.raises(NodeLostError):
                await asyncio.wait_for(work, 30)
        await link.make_ready(Use.CALL, Use.STREAM)
        await asyncio.sleep(0.1)  # asyncio closes a connection that TLS ended a little later


async def test_a_listener_on_the_port_learns_nothing(keys):
    async with Impostor() as impostor:
        await tell_everything(keys, f"https://127.0.0.1:{impostor.port}")

    assert impostor.heard, "nobody came at all"
    assert http_secret(CLUSTER_KEY).encode() not in impostor.heard
    assert b"otter" not in impostor.heard


async def test_without_certificates_it_would_learn_everything(keys):
    async with Impostor() as impostor:
        await tell_everything(keys, f"http://127.0.0.1:{impostor.port}", proven_as=None)

    assert http_secret(CLUSTER_KEY).encode() in impostor.heard


async def test_one_with_a_certificate_of_another_fabric_learns_nothing(keys, tmp_path):
    other = make_keys(tmp_path / "other").path
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other / "member.pem", other / "member.key")
    async with Impostor(context) as impostor:
        await tell_everything(keys, f"https://127.0.0.1:{impostor.port}")

    assert impostor.heard == b""


async def test_an_address_without_https_is_not_even_dialled(keys):
    async with Impostor() as impostor:
        await tell_everything(keys, f"http://127.0.0.1:{impostor.port}")

    assert not impostor.came.is_set()
