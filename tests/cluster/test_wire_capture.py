"""An eavesdropper on a running fabric's network learns no key, prompt, answer or block."""

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise

import pytest
import yaml

from fabric.keys import CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN
from router.supervise.processes import descendants, wait_for_exit
from tests.cluster.conftest import ROOT
from tests.support.packet_capture import Capture, missing_requirement
from tests.support.wire_secrets import keys_of, parts_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.privileged,
    pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement())),
]
KEY = "one-key-for-the-whole-family"
OPERATOR = "the-key-of-the-operator-of-it"
# Unlike anything that other tests send on this machine's loopback at the same time.
LETTERS = "aeiloprstuvwz"
NAME, CODE, *OTHERS = ("".join(secrets.choice(LETTERS) for _ in range(12)) for _ in range(80))
FILLER = " ".join(f"The friend of {a} is {b}." for a, b in pairwise(OTHERS))
TIMEOUT_S = 120.0


class Fabric:
    """`macfabric up` with three nodes and HTTPS, and a client that trusts its authority."""

    def __init__(self, folder):
        self.data = folder / "data"
        config = folder / "cluster.yaml"
        router = {"port": 0, "api_keys": {"family": KEY}, "tls": {"mode": "always"}}
        router |= {"operator_keys": {"me": OPERATOR}, "loopback_without_key": False}
        section = {"router": router}
        config.write_text(yaml.safe_dump({"metadata": {"macfabric": section}}))
        argv = [sys.executable, "-m", "router.cli.main", "up", "--nodes", "3", "--json"]
        self.log = folder / "up.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [*argv, "--data", str(self.data), "--config", str(config)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        self.url = json.loads(line)["url"]
        self.trust = ssl.create_default_context(cafile=self.data / "ca.pem")

    def send(self, path, body=None, agent="mira"):
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        headers["x-macfabric-operator-key"] = OPERATOR
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, raw, headers | {"x-agent-id": agent}, method="POST" if raw else "GET"
        )
        with urllib.request.urlopen(request, timeout=60, context=self.trust) as response:
            return json.loads(response.read()), response.headers

    def ask(self):
        """Repeat a turn until it is answered; return the answering node."""
        text = f"{FILLER} The vault code of {NAME} is {CODE}."
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Noted."}]
        messages.append({"role": "user", "content": f"The vault code of {NAME} is"})
        body = {"model": "recall", "messages": messages, "max_tokens": 12, "temperature": 0}
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                response, headers = self.send("/v1/chat/completions", body)
            except OSError:  # the node's lease is expiring
                assert time.monotonic() < deadline_s, self.log.read_text()
                time.sleep(0.2)
            else:
                assert CODE in response["choices"][0]["message"]["content"]
                return headers["x-macfabric-node"]

    def nodes(self):
        return {row["name"]: row for row in self.send("/v1/nodes")[0]["data"]}

    def secrets(self):
        """Return every secret by name, in each encoding in which it could appear on the wire."""
        block = max((self.data / "nodes").rglob("*.full"), key=lambda p: p.stat().st_size)
        keys = keys_of(
            (self.data / CLUSTER_KEY).read_text(),
            (self.data / MEMBER_KEY).read_text(),
            (self.data / RAY_TOKEN).read_bytes(),
        )
        texts = {
            "the client's key": KEY.encode(),
            "the operator's key": OPERATOR.encode(),
            "the prompt": NAME.encode(),
            "the answer": CODE.encode(),
        }
        return keys | texts | parts_of(block.read_bytes())

    def close(self):
        owned = descendants([self.popen.pid])
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(90)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.popen.stdout.close()
        assert wait_for_exit(owned, 30.0) == []


def plant(text):
    """Send text in the clear over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        client.sendall(text[: len(text) // 2])
        time.sleep(0.05)  # in two packets
        client.sendall(text[len(text) // 2 :])
        assert accepted.recv(len(text), socket.MSG_WAITALL) == text


def test_traffic_of_a_running_fabric_reveals_no_secret(tmp_path):
    with Capture("lo") as capture:
        fabric = Fabric(tmp_path)
        try:
            first = fabric.ask()
            target = next(name for name in fabric.nodes() if name != first)
            fabric.send("/v1/agents/mira/migrate", {"to": target})
            assert fabric.ask() == target
            os.kill(fabric.nodes()[target]["pid"], signal.SIGKILL)
            fabric.ask()
            deadline_s = time.monotonic() + TIMEOUT_S
            while any(row["state"] != "ready" for row in fabric.nodes().values()):
                assert time.monotonic() < deadline_s, fabric.log.read_text()
                time.sleep(0.5)
            hidden = fabric.secrets()
        finally:
            fabric.close()
        planted = {what: b"planted: " + secret for what, secret in hidden.items()}
        for text in planted.values():
            plant(text)

    assert capture.lost == 0
    assert capture.packets > 1000
    # The planted text is found, so a secret that is not found was not sent.
    assert {what: len(capture.find(text)) for what, text in planted.items()} == dict.fromkeys(
        planted, 1
    )
    seen = {what: capture.find(secret) for what, secret in hidden.items()}
    read = {what: [f for f in found if b"planted: " not in f] for what, found in seen.items()}
    assert {what: found[:3] for what, found in read.items() if found} == {}
