"""Clients of a real `macfabric up` can read every refusal, though they send whole bodies first."""

import http.client
import itertools
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

import pytest

from fabric.limits import MIB
from tests.support.fabric_process import ALICE, GROWTH_BYTES_MAX, HANG_S, used
from tests.support.up_fabric import running_up

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
SIZES_MIB = (1, 2, 4, 8, 12, 20, 31, 33, 48, 64)
ROUTES = (
    ("POST", "/v1/chat/completions", ALICE),
    ("POST", "/v1/chat/completions", "no key of anyone"),
    ("POST", "/v1/messages", ALICE),
    ("POST", "/v1/responses", ALICE),
    ("POST", "/v1/completions", ALICE),
    ("PUT", "/v1/chat/completions", ALICE),
    ("POST", "/v1/agents/mira/pin", ALICE),
    ("POST", "/v1/agents/mira/resume", ALICE),
    ("POST", "/v1/nodes/node-a/drain", ALICE),
    ("POST", "/v1/nowhere", ALICE),
)
PART = b"a" * MIB


class Client:
    """Client that sends a whole request before it reads."""

    def __init__(self, up):
        parts = urlsplit(up.url)
        self.address, self.tls = (parts.hostname, parts.port), None
        if parts.scheme == "https":
            self.tls = ssl.create_default_context(cafile=up.data / "ca.pem")

    def connect(self):
        sock = socket.create_connection(self.address, timeout=HANG_S)
        return self.tls.wrap_socket(sock, server_hostname=self.address[0]) if self.tls else sock

    def ask(self, method, path, key, body_mib, connection):
        """Return the status of the answer, and its body."""
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key}"]
        lines += [f"connection: {connection}", f"content-length: {body_mib * MIB}", "", ""]
        with self.connect() as sock:
            sock.sendall("\r\n".join(lines).encode())
            for _ in range(body_mib):
                sock.sendall(PART)
            answer = http.client.HTTPResponse(sock, method=method)
            answer.begin()
            return answer.status, answer.read()


@pytest.fixture(params=["auto", "always"], ids=["http", "https"])
def up(request, tmp_path):
    with running_up(tmp_path, router={"tls": {"mode": request.param}}) as running:
        yield running


def test_clients_read_every_refusal_of_a_long_body(up):
    client, done = Client(up), threading.Event()
    pulses, memory = [], [used(up.router_pid)[1]]

    def watch():
        while not done.wait(0.05):
            began_s = time.monotonic()
            status, _ = client.ask("GET", "/healthz", ALICE, 0, "close")
            pulses.append((status, time.monotonic() - began_s))
            memory.append(used(up.router_pid)[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = []
    try:
        for (route, size), connection in zip(
            itertools.product(ROUTES, SIZES_MIB), itertools.cycle(("close", "keep-alive", "close"))
        ):
            try:
                found.append((*route[:2], size, connection, *client.ask(*route, size, connection)))
            except OSError as error:
                found.append((*route[:2], size, connection, None, repr(error)))
    finally:
        done.set()
        watcher.join(HANG_S)

    print(
        f"{sum(each[4] is not None for each in found)} of {len(found)} answers were read; "
        f"the router grew by {(max(memory) - memory[0]) / MIB:.0f} MiB; "
        f"/healthz took {max(seconds for _, seconds in pulses):.3f} s at most"
    )
    unread = [each for each in found if each[4] is None or not 400 <= each[4] < 500]
    assert unread == []
    assert all(b'"message"' in each[5] for each in found)
    assert {status for status, _ in pulses} == {200}
    assert max(memory) - memory[0] <= GROWTH_BYTES_MAX
