"""One chaos run: a real `macfabric up`, clients that know the answers, and a nemesis."""

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fabric.record.manifest import encode_manifest
from router.supervise.processes import ProcessId
from tests.chaos.clients import ANSWER_S, Client, load_factor
from tests.chaos.drives import bounded_drives
from tests.chaos.judges import Judges, Violation, records
from tests.chaos.nemesis import Nemesis, device_environment
from tests.cluster.ray_fabric import RayFabric

CLIENTS = 6
NODES = ("node-a", "node-b", "node-c")
LOOK_S = 1.0
PAUSE_S = 6.0
ERASED_S = 25.0  # refused saves are retried every 15 s
UNSEEN = "unseen-device-errors"
PLANTS = ("wrong-answer", "erased-returns", "two-owners", UNSEEN)
QUIET_TURNS = 2


@dataclass
class Report:
    """Counts, faults and violations of a run."""

    seed: int
    seconds: float = 0.0
    answers: int = 0
    memories_judged: int = 0
    faults: list[tuple[float, str]] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def run(
    folder: Path,
    seed: int,
    minutes: float,
    *,
    only: str | None = None,
    plant: str | None = None,
    report_line: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run for `minutes`, then heal all faults, and check the final state."""
    with bounded_drives(folder / "data" / "nodes", NODES) as drives:
        if drives is None:
            report_line("no disk gets full: that takes root on Linux")
        devices = folder / "devices"
        devices.mkdir()
        if plant == UNSEEN:
            (devices / "unseen").touch()
        fabric = RayFabric(folder, environment=device_environment(devices))
        try:
            return _Run(fabric, seed, report_line, plant, drives, devices).live(minutes, only)
        finally:
            if fabric.popen.poll() is None:
                with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                    fabric.close()


class _Run:
    def __init__(self, fabric, seed, report_line, plant, drives, devices):
        self._fabric, self._seed, self._report_line, self._plant = fabric, seed, report_line, plant
        self._judges = Judges()
        self._nemesis = Nemesis(fabric, self._judges, seed, drives, devices)
        self._clients = [
            Client(fabric, self._judges, random.Random(f"{seed}:client {number}"), number)
            for number in range(CLIENTS)
        ]
        self._ended = threading.Event()

    def live(self, minutes, only):
        judges = self._judges
        self._fabric.await_ready(timeout_s=ANSWER_S * load_factor())
        for client in self._clients:
            client.step()
        before = self._most_resources()
        threads = [
            threading.Thread(target=client.run, args=(self._ended,), daemon=True)
            for client in self._clients
        ]
        threads.append(threading.Thread(target=self._poll_owners, daemon=True))
        for thread in threads:
            thread.start()
        pause = random.Random(f"{self._seed}:pause")
        while judges.now_s() < 60 * minutes:
            time.sleep(PAUSE_S * (0.5 + pause.random()) * load_factor() ** 0.5)
            kind = self._nemesis.strike(only)
            self._report_line(
                f"{judges.now_s():6.0f} s  {kind}: {judges.answers_count} answers,"
                f" {judges.judged_count} memories, {len(judges.found)} violations"
            )
        self._ended.set()
        for thread in threads:
            thread.join(2 * ANSWER_S * load_factor())
        self._settle(before)
        return Report(
            seed=self._seed,
            seconds=round(judges.now_s(), 1),
            answers=judges.answers_count,
            memories_judged=judges.judged_count,
            faults=self._nemesis.done,
            refusals=dict(sum((c.failures for c in self._clients), Counter())),
            violations=judges.found,
        )

    def _poll_owners(self):
        nodes = self._fabric.data / "nodes"
        while not self._ended.wait(LOOK_S):
            self._judges.check_owners(nodes)

    def _settle(self, before):
        """Wait until everything has recovered, and check the final state."""
        self._report_line("healed; what is left is judged")
        fabric, judges = self._fabric, self._judges
        try:
            fabric.await_ready(timeout_s=2 * ANSWER_S * load_factor())
        except AssertionError as error:
            judges.fail("healed", str(error)[:200])
            return
        for client in self._clients:
            for _ in range(QUIET_TURNS):
                if client.secret:
                    client.ask()
        judges.check_growth(before, self._most_resources())
        time.sleep(ERASED_S * load_factor() ** 0.5)
        if self._plant not in (None, UNSEEN):
            self._plant_violation()
        judges.check_owners(fabric.data / "nodes")
        erased_names = set().union(*(client.erased_names for client in self._clients))
        with contextlib.suppress(OSError, ValueError):
            rows = fabric.get("/v1/agents")["data"]
            judges.check_listed([row for row in rows if row["state"] != "erasing"], erased_names)
        try:
            fabric.close()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            judges.fail("closed", f"{error!r:.100}: {_traceback(fabric.data)}")
        words = set().union(*(client.erased for client in self._clients))
        judges.check_erased(fabric.data, words)
        self._check_folders()

    def _check_folders(self):
        command = [sys.executable, "-m", "router.cli.main", "fsck", "--data"]
        command.append(str(self._fabric.data))
        if self._nemesis.damaged:
            subprocess.run([*command, "--repair"], capture_output=True, check=False)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self._judges.fail("fsck", (done.stdout + done.stderr)[-400:])

    def _most_resources(self):
        """Return the largest counts of resources held by router and nodes, by kind."""
        found = {}
        with contextlib.suppress(OSError, ValueError, AssertionError, KeyError):
            found["router"] = _count_resources(self._fabric.router())
            nodes = [_count_resources(self._fabric.actor(name)) for name in self._fabric.names]
            found["node"] = {what: max(held[what] for held in nodes) for what in nodes[0]}
        return found

    # --- planted violations ------------------------------------------------------------------

    def _plant_violation(self):
        """Plant a violation that a judge must detect."""
        nodes = self._fabric.data / "nodes"
        if self._plant == "wrong-answer":
            client = next(each for each in self._clients if each.secret)
            client.secret = " ".join(reversed(client.secret.split()))
            client.ask()
            return
        node, record = next(
            (node, record)
            for node, record in records(nodes)
            if record.owner == node and not record.tenant.startswith("_")
        )
        (source,) = [p for p in nodes.glob(f"{node}/*/manifests/*.mf") if _holds_record(p, record)]
        if self._plant == "two-owners":
            other = next(name for name in self._fabric.names if name != node)
            folder = next((nodes / other).glob("*/manifests"))
            (folder / source.name).write_bytes(encode_manifest(replace(record, owner=other)))
        else:
            client = next(each for each in self._clients if each.secret)
            client.erased.add(client.marker)


def _traceback(data):
    """Return the last traceback of the router's log."""
    with contextlib.suppress(OSError):
        log = max(data.rglob("router.log"), key=lambda path: path.stat().st_mtime).read_text()
        _, found, text = log.rpartition("Traceback")
        return (found + text)[:2_000] if found else ""
    return ""


def _holds_record(path, record):
    return path.read_bytes() == encode_manifest(record)


def _count_resources(process: ProcessId) -> dict[str, int]:
    root = Path(f"/proc/{process.pid}")
    status = dict(
        line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line
    )
    return {
        "descriptors": len(list((root / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "mebibytes": int(status["VmRSS"].split()[0]) // 1024,
    }
