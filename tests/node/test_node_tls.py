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
            response = await http.post(
                service.node.resources.endpoint.url, CONTROL_PATH, b"", headers, name
            )
            response.close()
            return response.status
        finally:
            await asyncio.sleep(0.1)  # asyncio closes a connection slightly after TLS ends it


@pytest.mark.anyio
async def test_member_is_served(service, keys):
    assert service.node.resources.endpoint.url.startswith("https://")
    assert await post(service, keys, read_router_keys(keys).node_facing()) == 421  # another node


def test_tls_sends_without_nagle_or_session_tickets(service, keys):
    """Nagle's delay after the end of a handshake costs a control call 40 ms."""
    (listener,) = [s for server in service._server.servers for s in server.sockets]

    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert read_keys(keys).server_context().num_tickets == 0


@pytest.mark.anyio
@pytest.mark.parametrize("shows", ["nothing", "another authority's"])
async def test_stranger_with_the_secret_is_refused(service, keys, tmp_path, shows):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "ca.pem")
    if shows != "nothing":
        other = make_keys(tmp_path).path
        context.load_cert_chain(other / "member.pem", other / "member.key")

    with pytest.raises((aiohttp.ClientError, OSError)):
        await post(service, keys, context)


@pytest.mark.anyio
async def test_clear_text_request_is_refused(service, keys):
    url = service.node.resources.endpoint.url.replace("https://", "http://")
    async with NodeHttp() as http:
        answer = await http.post(url, CONTROL_PATH, b"", {})
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == HTTPS_REQUIRED
        await asyncio.sleep(0.1)


@pytest.mark.anyio
async def test_node_of_another_fabric_is_refused(service, keys, tmp_path):
    other = make_keys(tmp_path).path
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await post(service, keys, read_router_keys(other).node_facing())


def test_key_digest_identifies_the_fabric(keys, tmp_path):
    other = make_keys(tmp_path).path

    assert read_keys(keys).digest == read_keys(keys).digest
    assert read_keys(keys).digest != read_keys(other).digest
    assert read_keys(keys).cluster_key.hex() not in repr(read_keys(keys))


@pytest.mark.parametrize("name", [CLUSTER_KEY, MEMBER_KEY])
def test_keys_readable_by_others_are_refused(tmp_path, name):
    keys = make_keys(tmp_path).path
    (keys / name).chmod(0o640)

    with pytest.raises(FatalError, match="chmod 600"):
        read_keys(keys)


def test_error_for_missing_keys_names_the_create_command(tmp_path):
    with pytest.raises(FatalError, match="certs create"):
        read_keys(tmp_path)
