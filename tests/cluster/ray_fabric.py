"""A real fabric under `macfabric up`: its processes by role, its agents by record."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fabric.keys import OPERATOR_HEADER
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from router.cli.data_folder import KEPT_TEMPORARIES
from router.supervise.processes import ProcessId, descendants, identify, is_alive, wait_for_exit

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0  # how long a turn is retried before the test fails
SETTLE_S = 60.0
PAUSE_S = 0.1


@dataclass
class Agent:
    """A client's record of an agent: its fact, its history and its last owner."""

    name: str
    secret: str
    history: list[dict[str, str]] = field(default_factory=list)
    epoch: int = 0
    node: str = ""


class RayFabric:
    """A running `macfabric up`, with the calls and signals that tests send to it."""

    def __init__(
        self, folder: Path, nodes: int = 3, environment: Mapping[str, str] | None = None
    ) -> None:
        self._nodes_count = nodes
        self._environment = dict(environment or {})
        self.data, self._home = folder / "data", folder / "home"
        self._home.mkdir(parents=True)
        self.log = folder / "up.log"
        self.agents: list[Agent] = []
        self.start()

    def start(self) -> None:
        """Run `macfabric up` on the folder, and wait until all nodes serve."""
        self.launch()
        self.await_start()

    def launch(self) -> None:
        """Run `macfabric up` on the folder; it must not be running."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(self._home)}
        environment |= self._environment
        count = str(self._nodes_count)
        argv = [sys.executable, "-m", "router.cli.main", "up", "--nodes", count, "--port", "0"]
        with self.log.open("a") as log:
            self.popen = subprocess.Popen(
                [*argv, "--model", "recall", "--data", str(self.data), "--json"],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def await_start(self) -> None:
        """Wait until `macfabric up` reports that all nodes serve."""
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)
        self.url, self.names = self.ready["url"], self.ready["nodes"]

    # --- clients -----------------------------------------------------------------------------

    def get(self, path: str, timeout_s: float = 10.0):
        """Read one of the router's lists."""
        request = urllib.request.Request(self.url + path, headers=self._headers())
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            raw = response.read()
        return raw.decode() if path == "/metrics" else json.loads(raw)

    def _headers(self) -> dict[str, str]:
        """Return the operator's headers, with the key that `up` wrote into its folder."""
        return {OPERATOR_HEADER: (self.data / "operator.key").read_text()}

    def send(self, method: str, path: str, body: dict | None = None, timeout_s: float = 60.0):
        """Send one request; return its JSON for any status."""
        raw = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **self._headers()}
        request = urllib.request.Request(self.url + path, raw, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def post_chat(self, agent: Agent, text: str, max_tokens: int = 16, timeout_s: float = 60.0):
        """Take one turn; add the answer to the agent's history only if it is complete."""
        messages = [*agent.history, {"role": "user", "content": text}]
        body = {"model": "recall", "messages": messages, "max_tokens": max_tokens}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"content-type": "application/json", "x-agent-id": agent.name},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.loads(response.read())["choices"][0]["message"]["content"]
            agent.epoch = int(response.headers["x-macfabric-epoch"])
            agent.node = response.headers["x-macfabric-node"]
            cached = int(response.headers["x-macfabric-cached-tokens"])
        agent.history = [*messages, {"role": "assistant", "content": answer}]
        return answer, cached

    def send_ignoring_errors(self, *words):
        """Send one request, and ignore its outcome."""
        with contextlib.suppress(OSError, ValueError):
            self.send(*words)

    def ask(self, agent: str, body: dict, timeout_s: float = 90.0):
        """Take a turn of an agent; return any status and JSON."""
        headers = {"content-type": "application/json", "x-agent-id": agent}
        raw = json.dumps(body).encode()
        request = urllib.request.Request(self.url + "/v1/chat/completions", raw, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def active(self, node: str) -> int:
        """Return the number of a node's active turns."""
        return {row["name"]: row for row in self.get("/v1/nodes")["data"]}[node]["active"]

    def metric(self, name: str) -> float:
        """Read one of the router's counters."""
        lines = self.get("/metrics").splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def add_agent(self, name: str, secret: str) -> Agent:
        """Create an agent with a secret in its history."""
        agent = Agent(name, secret)
        filler = " ".join(f"The note {i} of {name} is about number {i * 7}." for i in range(30))
        self.post_chat(agent, f"The vault code of {name} is {secret}. {filler}", 2)
        self.agents.append(agent)
        return agent

    def await_recall(self, agent: Agent, timeout_s: float = ANSWER_S) -> float:
        """Ask for the agent's secret until it is answered; return the seconds until then."""
        began_s = time.monotonic()
        while True:
            try:
                answer, _ = self.post_chat(agent, f"The vault code of {agent.name} is")
            except (OSError, TimeoutError, ValueError) as error:
                if time.monotonic() - began_s > timeout_s:
                    pytest.fail(f"{agent.name}: {error}")
                time.sleep(PAUSE_S)
            else:
                assert agent.secret in answer, (agent.name, answer)
                return time.monotonic() - began_s

    def state_of(self, node: str) -> str:
        """Return a node's state as the router reports it; nothing while the router is down."""
        with contextlib.suppress(OSError, ValueError):
            rows = {row["name"]: row for row in self.get("/v1/nodes")["data"]}
            return rows[node]["state"] if node in rows else "unknown"
        return "no router"

    def await_ready(self, *names: str, timeout_s: float = 90.0) -> float:
        """Wait until the router reports these nodes (default: all) as ready; return the seconds."""
        began_s = time.monotonic()
        for name in names or self.names:
            while (state := self.state_of(name)) != "ready":
                assert time.monotonic() - began_s < timeout_s, (name, state, self.log.read_text())
                time.sleep(PAUSE_S)
        return time.monotonic() - began_s

    def incarnation(self, node: str) -> int:
        """Return a node's incarnation as the router reports it; 0 while the router is down."""
        with contextlib.suppress(OSError, ValueError):
            rows = {row["name"]: row for row in self.get("/v1/nodes")["data"]}
            return rows.get(node, {}).get("incarnation", 0)
        return 0

    def await_return(self, node: str, before: int, timeout_s: float = 90.0) -> float:
        """Wait until a node serves in a later incarnation than `before`; return the seconds."""
        began_s = time.monotonic()
        while self.incarnation(node) <= before or self.state_of(node) != "ready":
            assert time.monotonic() - began_s < timeout_s, (node, self.log.read_text())
            time.sleep(PAUSE_S)
        return time.monotonic() - began_s

    # --- records -----------------------------------------------------------------------------

    def records(self, agent: Agent) -> dict[str, Manifest]:
        """Read an agent's record from every node's disk, independent of the router."""
        found = {}
        for node in self.names:
            for path in (self.data / "nodes" / node).glob("*/manifests/*.mf"):
                with contextlib.suppress(FileNotFoundError):  # being replaced
                    record = decode_manifest(path.read_bytes()[:MANIFEST_BYTES_MAX])
                    if record.agent == agent.name:
                        found[node] = record
        return found

    def await_one_owner(self, agent: Agent, timeout_s: float = SETTLE_S) -> Manifest:
        """Wait until exactly one record is `owned`, with the highest epoch; return it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            records = self.records(agent)
            owned = [r for r in records.values() if r.state is OwnerState.OWNED]
            highest = max(r.epoch for r in records.values())
            sealed = [r for r in records.values() if r.state is OwnerState.SEALED]
            if len(owned) == 1 and not sealed and owned[0].epoch == highest:
                return owned[0]
            states = {node: (r.state.value, r.epoch) for node, r in records.items()}
            assert time.monotonic() < deadline_s, f"{agent.name}: {states}"
            time.sleep(PAUSE_S)

    def check_all(self) -> None:
        """Check that every agent has its memory and one owner, the node that answered last."""
        for agent in self.agents:
            self.await_recall(agent)
            record = self.await_one_owner(agent)
            assert (record.owner, record.epoch) == (agent.node, agent.epoch)

    # --- processes ---------------------------------------------------------------------------

    def actor(self, node: str) -> ProcessId:
        """Return the process that serves a node."""
        rows = {row["name"]: row for row in self.get("/v1/nodes")["data"]}
        found = identify(rows[node]["pid"])
        assert found is not None, f"{node} has no process"
        return found

    def ray_process(self, *words: str) -> ProcessId:
        """Return the one process of this fabric whose command line has all the words."""
        found = [p for p in descendants([self.popen.pid]) if all(w in command(p) for w in words)]
        assert len(found) == 1, (words, [command(p)[:120] for p in found])
        return found[0]

    def raylet(self, node: str) -> ProcessId:
        """Return the raylet of a node."""
        host = {row["name"]: row["host"] for row in self.get("/v1/nodes")["data"]}[node]
        return self.ray_process("raylet/raylet", f"--node_ip_address={host}")

    def router(self) -> ProcessId:
        """Return the router's process."""
        return self.ray_process("-m router ", "--ray-address")

    def head(self) -> ProcessId:
        """Return the GCS server of Ray's head."""
        return self.ray_process("gcs/gcs_server")

    @contextlib.contextmanager
    def watched(self, agents: list[Agent]) -> Iterator["Watch"]:
        """Poll the router and take turns of `agents` during a block; record all failures."""
        watch = Watch()
        threads = [threading.Thread(target=self._look, args=(watch,))]
        threads += [threading.Thread(target=self._talk, args=(watch, a)) for a in agents]
        for thread in threads:
            thread.start()
        try:
            yield watch
        finally:
            watch.ended.set()
            for thread in threads:
                thread.join(ANSWER_S + 30)

    def _look(self, watch: "Watch") -> None:
        last_s = time.monotonic()
        while not watch.ended.is_set():
            with contextlib.suppress(OSError, ValueError):
                self.get("/v1/models", timeout_s=60.0)
                watch.standstill_s = max(watch.standstill_s, time.monotonic() - last_s)
                last_s = time.monotonic()
            time.sleep(0.05)
        watch.standstill_s = max(watch.standstill_s, time.monotonic() - last_s)

    def _talk(self, watch: "Watch", agent: Agent) -> None:
        while not watch.ended.is_set():
            began_s = time.monotonic()
            try:
                answer, _ = self.post_chat(agent, f"The vault code of {agent.name} is", 4)
            except (OSError, TimeoutError, ValueError) as error:
                body = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                watch.failures.append(f"{agent.name}: {error} {body}")
                time.sleep(PAUSE_S)
            else:
                watch.turns += 1
                watch.longest_s = max(watch.longest_s, time.monotonic() - began_s)
                if not agent.secret.startswith(answer.split()[0]):
                    watch.failures.append(f"{agent.name}: {answer}")
                watch.ended.wait(PAUSE_S)

    def close(self) -> None:
        """Stop the fabric as a user would, and check that nothing is left."""
        owned = descendants([self.popen.pid])
        router_log = self.data / "logs" / "router.log"
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(60)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.popen.stdout.close()
        assert wait_for_exit(owned, 30.0) == []
        assert self.popen.returncode == 0, self.log.read_text()
        assert "SIGTERM received" not in router_log.read_text(), "it did not exit by itself"
        assert "Traceback" not in router_log.read_text()
        temporaries = {path.name for path in (self.data / "tmp").iterdir()}
        assert temporaries <= KEPT_TEMPORARIES, "temporary files are left"


@dataclass
class Watch:
    """Observations of a fabric during a fault."""

    ended: threading.Event = field(default_factory=threading.Event)
    turns: int = 0
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # the longest answered turn
    standstill_s: float = 0.0  # the longest time without a reply of the router itself


def command(process: ProcessId) -> str:
    """Return a process's command line; empty if it has ended."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def kill(process: ProcessId, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to exactly this process."""
    assert is_alive(process), "the process had already ended"
    os.kill(process.pid, number)
