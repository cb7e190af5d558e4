"""Keys are not sent where others could read them, and a wrong scheme is explained."""

import json
import socket
import threading

import pytest

from router.cli.data_folder import DataFolder
from router.cli.endpoint import Endpoint, find_endpoint
from router.cli.errors import CommandError

LAN = "http://192.168.1.10:8000"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    made = DataFolder(tmp_path / "data")
    made.create()
    made.renew_operator_key()
    for name in ("MACFABRIC_URL", "MACFABRIC_API_KEY", "MACFABRIC_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    return made


def found(folder, url, record=None):
    folder.endpoint.write_text(json.dumps({"url": record or url}))
    return find_endpoint(None, folder.path)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://localhost:8000",
        "https://10.0.0.9:8000",
    ],
)
def test_the_folders_key_is_sent_where_only_the_router_can_read_it(folder, url):
    endpoint = found(folder, url)

    assert endpoint.operator_key == folder.read_operator_key()
    assert endpoint.warning is None


def test_the_folders_key_is_not_sent_readably_over_a_network(folder):
    endpoint = found(folder, LAN)
    assert endpoint.operator_key is None
    assert "x-macfabric-operator-key" not in {name.lower() for name in endpoint.headers({})}
    assert endpoint.warning is None

    refused = json.dumps({"error": {"message": "an operator's key is needed"}}).encode()
    with pytest.raises(CommandError, match=r"router\.tls\.mode.*MACFABRIC_OPERATOR_KEY"):
        endpoint.read(403, refused)


def test_who_sends_a_key_readably_over_a_network_is_warned(folder, monkeypatch):
    monkeypatch.setenv("MACFABRIC_OPERATOR_KEY", "given")
    endpoint = found(folder, LAN)

    assert endpoint.operator_key == "given"
    assert "can read the key" in endpoint.warning
    assert find_endpoint(LAN, None, "a-tenants").warning
    monkeypatch.delenv("MACFABRIC_OPERATOR_KEY")
    assert find_endpoint(LAN, None).warning is None, "there is no key to read"


def test_the_warning_is_printed_beside_the_answer(run, fabric, monkeypatch):
    monkeypatch.setattr("router.cli.endpoint.is_loopback", lambda host: False)
    status, out, err = run("nodes", "--url", fabric.url, "--key", "a-tenants")

    assert status == 0
    assert "node-a" in out
    assert err.startswith("warning: ")
    assert "a-tenants" not in err


def test_a_router_that_speaks_https_is_named():
    refused = json.dumps({"error": {"message": "x", "code": "https_required"}}).encode()
    with pytest.raises(CommandError, match="speaks https"):
        Endpoint("http://127.0.0.1:8000").read(400, refused)


def test_a_server_that_speaks_no_https_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CommandError, match="does not answer as https does"):
            Endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}").get("/healthz")
        thread.join()
