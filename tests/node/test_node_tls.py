"""A node serves members of its fabric only, and proves itself before anything is sent to it."""

import asyncio
import socket
import ssl

import aiohttp
import pytest

from fabric.control.calls import CONTROL_PATH
from fabric.errors import HTTPS_REQUIRED, FatalError
from fabric.keys import CLUSTER_KEY, MEMBER_KEY, MEMBER_NAME, http_secret
from fabric.turn.generation import CLUSTER_HEADER
from node.keys import read_keys
from router.fleet.node_http import NodeHttp
from router.tls.contexts import read_router_keys
from tests.support.keys import make_keys
from tests.support.services import running
from tests.support.tiny_models import LLAMA, write_model


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys")).path


@pytest.fixture(scope="module")
def service(keys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    found = read_keys(keys)
    model = write_model(folder / "model", LLAMA)
    with running(
        folder, model, cluster_key=found.cluster_key, tls=found.server_context()
    ) as service:
        yield service


async def post(service, keys, context, name=MEMBER_NAME):
    secret = http_secret(read_keys(keys).cluster_key)
    headers = {CLUSTER_HEADER: secret, "x-macfabric-node": "another"}
    async with NodeHttp(context) as http:
        try:
            asked = await http.post(
                service.node.resources.endpoint.url, CONTROL_PATH, b"", headers, name
            )
            asked.close()
            return asked.status
        finally:
            await asyncio.sleep(0.1)  # asyncio closes a connection that TLS ended a little later


@pytest.mark.anyio
async def test_a_member_is_served(service, keys):
    assert service.node.resources.endpoint.url.startswith("https://")
    assert await post(service, keys, read_router_keys(keys).node_facing()) == 421  # another node


def test_no_answer_waits_for_an_acknowledgement(service, keys):
    """Nagle's delay behind a handshake's last words cost a call in haste 40 ms."""
    (listener,) = [s for server in service._server.servers for s in server.sockets]

    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert read_keys(keys).server_context().num_tickets == 0


@pytest.mark.anyio
@pytest.mark.parametrize("shows", ["nothing", "another authority's"])
async def test_a_stranger_is_refused_even_with_the_secret(service, keys, tmp_path, shows):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "ca.pem")
    if shows != "nothing":
        other = make_keys(tmp_path).path
        context.load_cert_chain(other / "member.pem", other / "member.key")

    with pytest.raises((aiohttp.ClientError, OSError)):
        await post(service, keys, context)


@pytest.mark.anyio
async def test_clear_text_is_refused(service, keys):
    url = service.node.resources.endpoint.url.replace("https://", "http://")
    async with NodeHttp() as http:
        answer = await http.post(url, CONTROL_PATH, b"", {})
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == HTTPS_REQUIRED
        await asyncio.sleep(0.1)


@pytest.mark.anyio
async def test_a_node_of_another_fabric_is_refused(service, keys, tmp_path):
    other = make_keys(tmp_path).path
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await post(service, keys, read_router_keys(other).node_facing())


def test_copies_of_one_folder_have_one_digest_and_others_another(keys, tmp_path):
    other = make_keys(tmp_path).path

    assert read_keys(keys).digest == read_keys(keys).digest
    assert read_keys(keys).digest != read_keys(other).digest
    assert read_keys(keys).cluster_key.hex() not in repr(read_keys(keys))


@pytest.mark.parametrize("name", [CLUSTER_KEY, MEMBER_KEY])
def test_keys_that_others_may_read_are_refused(tmp_path, name):
    keys = make_keys(tmp_path).path
    (keys / name).chmod(0o640)

    with pytest.raises(FatalError, match="chmod 600"):
        read_keys(keys)


def test_missing_keys_say_what_makes_them(tmp_path):
    with pytest.raises(FatalError, match="certs create"):
        read_keys(tmp_path)
