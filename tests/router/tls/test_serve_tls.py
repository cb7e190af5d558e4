"""A router's port with certificates, as users configure and call it."""

import asyncio
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx2
import pytest

from fabric.errors import FatalError
from fabric.settings import RouterSettings, TlsSettings
from router.cli.endpoint import find_fabric
from router.client.http_api import ClientError
from router.listener import listen
from router.private_files import write_private
from router.serve import serve_roster
from router.tls.authority import Subject, issue_member, make_authority
from router.tls.contexts import read_router_keys
from tests.router.fake_node import MODEL, FakeNode
from tests.support.keys import make_keys

pytestmark = pytest.mark.anyio
KEY = "a-tenants-own-key"
KEYS = {"own": KEY}
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "keys")


def own_certificate(folder):
    """Write another authority's certificate for this machine, and its key, as an operator would."""
    now = datetime.now(UTC)
    authority = make_authority("of the operator", now)
    own = issue_member(authority, Subject.of(["127.0.0.1", "localhost"]), now)
    write_private(folder / "own-ca.pem", authority.certificate.decode())
    write_private(folder / "own.pem", own.certificate.decode())
    write_private(folder / "own.key", own.key.decode())
    return TlsSettings(certificate=str(folder / "own.pem"), key=str(folder / "own.key"))


@asynccontextmanager
async def serving(keys, settings):
    """Run a router over one node, both with TLS; yield its URL."""
    found = read_router_keys(keys.path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.path / "member.pem", keys.path / "member.key")
    node = FakeNode("node-a", tls=context)
    node.cluster_key = found.cluster_key
    await node.start()
    ready = asyncio.get_running_loop().create_future()

    async def roster():
        return {"node-a": node}

    listeners = listen("127.0.0.1", 0)  # reachable by tests, unlike the host of the settings
    task = asyncio.create_task(
        serve_roster(
            settings,
            found.cluster_key,
            roster,
            listeners,
            keys=found,
            on_ready=lambda url, _: ready.set_result(url),
        )
    )
    try:
        await asyncio.wait({task, ready}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # raise the error that ended it
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for listener in listeners:
            listener.close()
        await node.stop()


async def get_models(url, authority):
    context = ssl.create_default_context(cafile=str(authority))
    async with httpx2.AsyncClient(verify=context, base_url=url) as http:
        return await http.get("/v1/models", headers=BEARER)


async def test_router_beyond_loopback_uses_https_by_default(keys, tmp_path):
    async with serving(keys, RouterSettings(host="0.0.0.0", api_keys=KEYS)) as url:
        assert url.startswith("https://")
        answer = await get_models(url, keys.authority)
        assert answer.status_code == 200
        with pytest.raises(httpx2.ConnectError):
            await get_models(url, make_keys(tmp_path / "others").authority)
        async with httpx2.AsyncClient(base_url=url.replace("https", "http")) as http:
            response = await http.get("/v1/models", headers=BEARER)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "https_required"


async def test_https_works_on_both_loopbacks(keys):
    async with serving(keys, RouterSettings(host="0.0.0.0", api_keys=KEYS)) as url:
        port = url.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            answer = await get_models(f"https://{host}:{port}", keys.authority)
            assert answer.status_code == 200, host
            async with httpx2.AsyncClient(base_url=f"http://{host}:{port}") as http:
                response = await http.get("/v1/models", headers=BEARER)
            assert response.json()["error"]["code"] == "https_required", host


async def test_router_on_loopback_uses_http_unless_configured(keys):
    async with serving(keys, RouterSettings(api_keys=KEYS)) as url:
        assert url.startswith("http://")
    always = RouterSettings(api_keys=KEYS, tls=TlsSettings(mode="always"))
    async with serving(keys, always) as url:
        assert (await get_models(url, keys.authority)).status_code == 200


async def test_operator_certificate_is_served_to_clients(keys, tmp_path):
    settings = RouterSettings(host="0.0.0.0", api_keys=KEYS, tls=own_certificate(tmp_path))
    async with serving(keys, settings) as url:
        assert (await get_models(url, tmp_path / "own-ca.pem")).status_code == 200
        with pytest.raises(httpx2.ConnectError):
            await get_models(url, keys.authority)


async def test_invalid_certificate_files_are_named_at_start(keys, tmp_path):
    tls = own_certificate(tmp_path)
    (tmp_path / "own.key").write_text("no key")
    settings = RouterSettings(host="0.0.0.0", api_keys=KEYS, tls=tls)
    with pytest.raises(FatalError, match=r"own\.pem and .*own\.key"):
        async with serving(keys, settings):
            pass


async def test_command_line_connects_and_names_missing_ca(keys, tmp_path, monkeypatch):
    def ask(url):
        return find_fabric(url, tmp_path / "none", KEY).get("/v1/models")

    settings = RouterSettings(host="0.0.0.0", api_keys=KEYS, tls=own_certificate(tmp_path))
    async with serving(keys, settings) as url:
        monkeypatch.delenv("MACFABRIC_CA", raising=False)
        with pytest.raises(ClientError, match="MACFABRIC_CA"):
            await asyncio.to_thread(ask, url)
        with pytest.raises(ClientError, match="speaks https"):
            await asyncio.to_thread(ask, url.replace("https://", "http://"))
        monkeypatch.setenv("MACFABRIC_CA", str(tmp_path / "own-ca.pem"))
        listed = await asyncio.to_thread(ask, url)
    assert [row["id"] for row in listed["data"]] == [MODEL]
