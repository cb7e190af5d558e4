"""Keys are not sent where others could read them, and errors explain a wrong scheme."""

import argparse
import json
import socket
import threading
from dataclasses import replace

import pytest

from router.cli.data_folder import DataFolder
from router.cli.endpoint import fabric_of, find_fabric, sends_key_unencrypted
from router.client.client import Fabric
from router.client.http_api import ClientError, RefusedError
from tests.cli.fake_fabric import ANSWERS, STATUSES

LAN = "http://192.168.1.10:8000"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    data_folder = DataFolder(tmp_path / "data")
    data_folder.create()
    data_folder.renew_operator_key()
    for name in ("MACFABRIC_URL", "MACFABRIC_API_KEY", "MACFABRIC_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    return data_folder


def client_of(folder, url, record=None):
    folder.endpoint.write_text(json.dumps({"url": record or url}))
    return find_fabric(None, folder.path)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://localhost:8000",
        "https://10.0.0.9:8000",
    ],
)
def test_operator_key_is_sent_over_loopback_or_https(folder, url):
    client = client_of(folder, url)

    assert client.operator_key == folder.read_operator_key()
    assert not sends_key_unencrypted(client)


def test_operator_key_is_not_sent_in_clear_text_over_a_network(folder, fabric, monkeypatch):
    client = client_of(folder, LAN)
    assert client.operator_key is None
    assert not sends_key_unencrypted(client)

    monkeypatch.setitem(STATUSES, ("GET", "/v1/nodes"), 403)
    with pytest.raises(RefusedError, match=r"router\.tls\.mode.*MACFABRIC_OPERATOR_KEY"):
        replace(client, url=fabric.url).nodes()


def test_sending_a_key_in_clear_text_prints_a_warning(folder, monkeypatch, capsys):
    monkeypatch.setenv("MACFABRIC_OPERATOR_KEY", "given")
    client = client_of(folder, LAN)

    assert client.operator_key == "given"
    assert sends_key_unencrypted(client)
    fabric_of(argparse.Namespace(url=LAN, data=None, key="a-tenants"))
    assert "can read the key" in capsys.readouterr().err
    monkeypatch.delenv("MACFABRIC_OPERATOR_KEY")
    assert not sends_key_unencrypted(find_fabric(LAN, None)), "there is no key to read"


def test_clear_text_warning_goes_to_stderr(run, fabric, monkeypatch):
    monkeypatch.setattr("router.cli.endpoint.is_loopback", lambda host: False)
    status, out, err = run("nodes", "--url", fabric.url, "--key", "a-tenants")

    assert status == 0
    assert "node-a" in out
    assert err.startswith("warning: ")
    assert "a-tenants" not in err


def test_https_router_is_named_in_error(fabric, monkeypatch):
    refused = {"error": {"message": "x", "code": "https_required"}}
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), refused)
    monkeypatch.setitem(STATUSES, ("GET", "/v1/nodes"), 400)
    with pytest.raises(RefusedError, match="speaks https"):
        Fabric(fabric.url).nodes()


def test_http_server_is_named_in_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ClientError, match="does not answer as https does"):
            Fabric(f"https://127.0.0.1:{listener.getsockname()[1]}").get("/healthz")
        thread.join()
