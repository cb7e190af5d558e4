import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from socket import AF_INET, AF_INET6

import httpx2
import openai
import pytest

from fabric.errors import FatalError
from fabric.keys import OPERATOR_HEADER
from fabric.settings import RouterSettings
from router.listener import IPV6_LOOPBACK, listen, urls_of
from router.serve import serve_roster
from tests.router.fake_node import CLUSTER_KEY, MODEL, FakeNode
from tests.router.rig import OPERATOR_KEY, until
from tests.router.sse_reader import following
from tests.support.keys import make_keys

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.anyio
async def test_router_serves_from_first_ready_node_until_signal():
    node = FakeNode("node-a")
    nodes = {}
    ready = []

    async def roster():
        return nodes

    listeners = listen("127.0.0.1", 0)
    serving = asyncio.create_task(
        serve_roster(
            RouterSettings(operator_keys={"ops": OPERATOR_KEY}),
            CLUSTER_KEY,
            roster,
            listeners,
            on_ready=lambda url, names: ready.append((url, names)),
        )
    )
    url, url_by_ipv6 = urls_of(listeners)
    async with httpx2.AsyncClient(base_url=url, verify=False) as http:
        while True:
            try:
                early = await http.get("/healthz")
                break
            except httpx2.TransportError:
                await asyncio.sleep(0.01)
        assert early.status_code == 503
        assert ready == []
        await node.start()
        nodes["node-a"] = node
        await until(lambda: ready)
        async with httpx2.AsyncClient(base_url=url_by_ipv6, verify=False) as by_ipv6:
            listed = await by_ipv6.get("/v1/models")
            health = await by_ipv6.get("/healthz", headers={OPERATOR_HEADER: OPERATOR_KEY})
        node.behaviour.delay_s = 0.01
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x " * 30}]}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
        await until(lambda: node.running)
        operator = {OPERATOR_HEADER: OPERATOR_KEY}
        async with following(http, **operator) as stream:
            first = await stream.next()
            os.kill(os.getpid(), signal.SIGTERM)
            while await stream.next() is not None:
                pass
        answer = await asking
        await asyncio.wait_for(serving, 5)  # less than the time limit of running requests
    await node.stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)

    assert ready == [(url, ["node-a"])]
    assert first.name == "snapshot"
    assert answer.status_code == 200, "the running turn has finished"
    assert listed.status_code == 200, "programs on this machine need no key there, either"
    assert health.json()["urls"] == [url, url_by_ipv6]


@pytest.fixture
def opened():
    """Return a function that opens listeners; close them after the test."""
    with ExitStack() as stack:

        def opens(host, port=0):
            listeners = listen(host, port)
            for listener in listeners:
                stack.enter_context(listener)
            return listeners

        yield opens


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", AF_INET), (IPV6_LOOPBACK, AF_INET6)])
def test_port_in_use_on_either_loopback_is_named(host, family):
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FatalError, match=f"{host} port {port}"):
            listen("127.0.0.1", port)
    for listener in listen("127.0.0.1", port):
        listener.close()  # no socket was left open


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_local_router_listens_on_both_loopbacks(opened, host):
    urls = urls_of(opened(host))

    port = urls[0].rpartition(":")[2]
    assert urls == [f"http://127.0.0.1:{port}", f"http://[::1]:{port}"]


@pytest.mark.parametrize("host", ["127.0.0.5", IPV6_LOOPBACK])
def test_explicit_address_is_the_only_one(opened, host):
    assert [listener.getsockname()[0] for listener in opened(host)] == [host]


@pytest.mark.parametrize("reason", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_machine_without_ipv6_listens_on_ipv4(opened, monkeypatch, reason):
    create = socket.create_server

    def without_ipv6(address, *, family, **options):
        if family == AF_INET6:
            raise OSError(reason, "no IPv6")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)

    assert len(opened("127.0.0.1")) == 1


def test_chosen_port_is_free_on_both_loopbacks(opened, monkeypatch):
    create, refused = socket.create_server, []

    def taken_twice(address, *, family, **options):
        if family == AF_INET6 and len(refused) < 2:
            refused.append(address[1])
            raise OSError(errno.EADDRINUSE, "in use")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", taken_twice)
    four, six = opened("127.0.0.1")

    assert len(refused) == 2
    assert four.getsockname()[1] == six.getsockname()[1]


def router(*arguments):
    command = [sys.executable, "-m", "router", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


def test_failed_start_prints_its_reason(tmp_path):
    no_key = router("--data-dir", str(tmp_path))
    (tmp_path / "cluster.key").write_text("abcd")
    short_key = router("--data-dir", str(tmp_path))

    assert no_key.returncode == short_key.returncode == 1
    assert "cluster.key" in no_key.stderr
    assert "32 bytes" in short_key.stderr
    assert "Traceback" not in no_key.stderr + short_key.stderr


def test_unloadable_policy_fails_the_start(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "metadata: {macfabric: {router: {policies: [{use: 'tests.router.policies:Missing'}]}}}\n"
    )
    result = router("--data-dir", str(tmp_path), "--config", str(config))

    assert result.returncode == 1
    assert "router: macfabric.router.policies[0].use: cannot import" in result.stderr
    assert "Traceback" not in result.stderr


class World:
    """The child process that runs Ray."""

    def __init__(self, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.ray_world"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._line()["address"]

    def _line(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        pytest.fail("Ray did not start")

    def order(self, line):
        print(line, file=self.process.stdin, flush=True)
        if line != "quit":
            self._line()

    def close(self):
        self.order("quit")
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


def wait_for(condition, timeout_s=90.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.1)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.nightly
def test_router_finds_nodes_in_ray_and_survives_their_death(tmp_path):
    make_keys(tmp_path, CLUSTER_KEY)
    own = {"PYTHONPATH": str(ROOT), "MACFABRIC_TEST_KEYS": str(tmp_path)}
    environment = os.environ | own | {"RAY_AUTH_MODE": "disabled"}
    world = World(environment)
    running = None
    closing = ExitStack()
    log_file = closing.enter_context((tmp_path / "log").open("w"))
    try:
        world.order("make node-a")
        running = subprocess.Popen(
            [
                *(sys.executable, "-m", "router", "--data-dir", str(tmp_path)),
                *("--ray-address", world.address, "--port", "0"),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
        )
        ready = json.loads(running.stdout.readline())
        url = ready["url"]

        def states():
            with urllib.request.urlopen(f"{url}/v1/nodes") as answer:
                return {n["name"]: n["state"] for n in json.load(answer)["data"]}

        client = closing.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        )
        chat = client.chat.completions
        user = [{"role": "user", "content": "one two"}]
        alice = {"x-agent-id": "alice"}
        first = chat.create(model=MODEL, messages=user, extra_headers=alice)
        world.order("make node-b")
        wait_for(lambda: states().get("node-b") == "ready")
        world.order("kill node-a")
        after = chat.with_raw_response.create(model=MODEL, messages=user, extra_headers=alice)
        world.order("make node-a")
        wait_for(lambda: states()["node-a"] == "ready")
        running.send_signal(signal.SIGTERM)
        status = running.wait(60)
    finally:
        if running and running.poll() is None:
            running.kill()
            running.wait()
        if running:
            running.stdout.close()
        world.close()
        closing.close()

    log = (tmp_path / "log").read_text()
    assert ready["nodes"] == ["node-a"]
    assert first.choices[0].message.content == "<user>one two "
    assert after.headers["x-macfabric-node"] == "node-b"
    # A router that has not found all nodes skips all epochs that another may have issued.
    assert int(after.headers["x-macfabric-epoch"]) > 1
    assert status == 0, log
    assert "Traceback" not in log, log
    assert "one two" not in log
