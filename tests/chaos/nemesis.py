"""Faults of a real fabric's processes and disks, chosen by a seed."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fabric.limits import KIB, MIB
from router.supervise.processes import descendants, wait_for_exit
from tests.chaos.drives import Drives
from tests.chaos.judges import Judges
from tests.cluster.ray_fabric import ROOT, RayFabric, kill

FROZEN_S = (1.0, 4.0, 12.0)
LEFT_BYTES = (0, 64 * KIB, 2 * MIB)  # on a full disk: nothing, records, a few blocks
DAMAGES = 3
DEVICE_ERRORS = (1, 2, 4)  # three within a minute end the process
DEVICE_WAIT_S = 5.0  # for an operation that can fail
KILLED_SHARE = 0.3
GONE_S = 30.0
KINDS = (
    "kill node",
    "freeze node",
    "kill raylet",
    "kill head raylet",
    "kill gcs",
    "kill router",
    "freeze router",
    "damage blocks",
    "unwritable disk",
    "full disk",
    "kill everything",
    "fail device",
)
FAILING_DEVICE = Path(__file__).parent / "failing_device"


class Nemesis:
    """Source of one fault after the other; each fault is healed before its call returns."""

    def __init__(
        self,
        fabric: RayFabric,
        judges: Judges,
        seed: int,
        drives: Drives | None,
        devices: Path | None = None,
    ) -> None:
        self._fabric = fabric
        self._drives = drives
        self._devices = devices
        self._judges = judges
        self._random = random.Random(f"{seed}:nemesis")
        self.done: list[tuple[float, str]] = []
        self.damaged = False
        self._struck: set[str] = set()
        faults = (
            self._kill_node,
            self._freeze_node,
            self._kill_raylet,
            self._kill_head_raylet,
            self._kill_gcs,
            self._kill_router,
            self._freeze_router,
            self._damage,
            self._make_read_only,
            self._fill_drive,
            self._kill_everything,
            self._fail_device,
        )
        self._kinds = dict(zip(KINDS, faults, strict=True))

    def strike(self, only: str | None = None) -> str:
        """Inject one fault and return its kind; skip it if its target does not exist at present."""
        weights = [1 if kind == "kill everything" else 3 for kind in KINDS]
        kind = only or self._random.choices(KINDS, weights)[0]
        self.done.append((round(self._judges.now_s(), 1), kind))
        self._struck.clear()
        with contextlib.suppress(OSError, ValueError, KeyError, AssertionError):
            self._kinds[kind]()
        for name in self._struck:  # turns acknowledged until now may be lost with it
            self._judges.record_fault(name)
        return kind

    def _record_fault(self, name: str) -> None:
        self._struck.add(name)
        self._judges.record_fault(name)

    def _node(self) -> str:
        node = self._random.choice(self._fabric.names)
        self._record_fault(node)
        return node

    def _record_fault_of_all(self) -> None:
        for name in (*self._fabric.names, "router"):
            self._record_fault(name)

    def _kill_node(self) -> None:
        kill(self._fabric.actor(self._node()))

    def _freeze(self, process) -> None:
        kill(process, signal.SIGSTOP)
        try:
            time.sleep(self._random.choice(FROZEN_S))
        finally:
            with contextlib.suppress(AssertionError, OSError):
                kill(process, signal.SIGCONT)

    def _freeze_node(self) -> None:
        node = self._node()
        self._freeze(self._fabric.actor(node))

    def _kill_raylet(self) -> None:
        self._kill_raylet_of(self._node())

    def _kill_head_raylet(self) -> None:
        self._record_fault_of_all()
        self._kill_raylet_of(self._fabric.names[0])

    def _kill_raylet_of(self, node: str) -> None:
        self._kill_with_actor(self._fabric.raylet(node), node)

    def _kill_gcs(self) -> None:
        self._record_fault_of_all()
        self._kill_with_actor(self._fabric.head(), self._fabric.names[0])

    def _kill_with_actor(self, process, node: str) -> None:
        """Kill a process, and wait for the actor's end: until then it may acknowledge a turn."""
        actor = self._fabric.actor(node)
        kill(process)
        wait_for_exit([actor], GONE_S)

    def _kill_router(self) -> None:
        self._record_fault("router")
        kill(self._fabric.router())

    def _freeze_router(self) -> None:
        self._record_fault("router")
        self._freeze(self._fabric.router())

    def _damage(self) -> None:
        """Flip, cut or remove block files of a node without its knowledge."""
        node = self._random.choice(self._fabric.names)
        self._record_fault(f"disk {node}")
        self.damaged = True
        blocks = sorted((self._fabric.data / "nodes" / node).glob("*/blocks/*"))
        for path in self._random.sample(blocks, min(DAMAGES, len(blocks))):
            with contextlib.suppress(OSError):
                self._damage_file(path)

    def _damage_file(self, path) -> None:
        raw = bytearray(path.read_bytes())
        kind = self._random.choice(["flip", "cut", "lose"])
        if kind == "lose":
            path.unlink()
            return
        at = self._random.randrange(len(raw))
        raw[at] ^= 1
        path.chmod(0o600)
        path.write_bytes(raw if kind == "flip" else raw[:at])

    def _make_read_only(self) -> None:
        """Make a node's folders read-only for a while, even for root."""
        node = self._random.choice(self._fabric.names)
        self._record_fault(f"disk {node}")
        folders = [
            path
            for name in ("manifests", "blocks")
            for path in (self._fabric.data / "nodes" / node).glob(f"*/{name}")
        ]
        with _immutable(folders):
            time.sleep(self._random.choice(FROZEN_S))

    def _fill_drive(self) -> None:
        """Fill a node's drive almost completely for a while; sometimes kill its actor meanwhile."""
        if self._drives is None:
            return
        node = self._random.choice(self._fabric.names)
        self._record_fault(f"disk {node}")
        with self._drives.filled(node, self._random.choice(LEFT_BYTES)):
            if self._random.random() < KILLED_SHARE:
                self._record_fault(node)
                kill(self._fabric.actor(node))
            time.sleep(self._random.choice(FROZEN_S))

    def _fail_device(self) -> None:
        """Make operations of a node's device compute garbage, with errors raised later."""
        if self._devices is None:
            return
        node = self._node()
        trigger = self._devices / str(self._fabric.actor(node).pid)
        for _ in range(self._random.choice(DEVICE_ERRORS)):
            trigger.touch()
            wait_until(lambda: not trigger.exists(), DEVICE_WAIT_S)
        trigger.unlink(missing_ok=True)

    def _kill_everything(self) -> None:
        """Kill the supervisor and with it the whole fabric, and start again on the same folder."""
        self._record_fault_of_all()
        fabric = self._fabric
        owned = descendants([fabric.popen.pid])
        fabric.popen.kill()
        fabric.popen.wait()
        fabric.popen.stdout.close()
        survivors = wait_for_exit(owned, 60.0)
        if survivors:
            self._judges.fail("processes", f"{len(survivors)} outlive their supervisor")
        fabric.start()


def device_environment(folder: Path) -> dict[str, str]:
    """Return the environment by which files in this folder make nodes' devices fail."""
    path = os.pathsep.join((str(ROOT), str(FAILING_DEVICE)))
    return {"PYTHONPATH": path, "MACFABRIC_CHAOS_DEVICE": str(folder)}


def wait_until(is_over: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `is_over` holds, or the timeout passes."""
    deadline_s = time.monotonic() + timeout_s
    while not is_over() and time.monotonic() < deadline_s:
        time.sleep(0.02)


@contextlib.contextmanager
def _immutable(folders):
    """Make folders immutable by the file system's own flag if possible, else by their mode."""
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i", *map(str, folders)], check=False, capture_output=True)
    else:
        for folder in folders:
            folder.chmod(0o500)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["chattr", "-i", *map(str, folders)], check=False, capture_output=True)
        else:
            for folder in folders:
                folder.chmod(0o700)
