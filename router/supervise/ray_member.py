"""This Mac as a member of a cluster file's Ray cluster; `ray up` runs this module on every Mac.

Everything lies in ~/macfabric: the synced code and keys, the virtual environment, Ray's files.
"""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.keys import SHIPPED_KEYS
from router.private_files import close_to_others, write_private
from router.supervise.processes import ProcessId, identify, send, wait_for_exit
from router.supervise.ray_processes import (
    HEALTH_CHECKS,
    SESSION_VARIABLE,
    START_ENVIRONMENT,
    START_HOOK,
    member_environment,
)

RAY_PORT: Final = 6_379
OBJECT_STORE_BYTES: Final = 500_000_000  # Ray carries control messages, never KV blocks
# macOS starts with 256 files and refuses more than kern.maxfilesperproc: 10,240 on some Macs.
OPEN_FILES: Final = (65_536, 24_576, 10_240)
SESSION: Final = "macfabric"
SERVE_COMMAND: Final = "macfabric serve"
HEAD_STARTS: Final = 3  # a busy Mac may need a second try
WORKER_STARTS: Final = 5  # Ray tries each worker once and never again
RETRY_S: Final = 5.0
ROUTER_STOP_S: Final = 90.0
_CODE: Final = ("fabric", "node", "router")
_GCS_SERVER: Final = re.compile(rf"gcs_server .*={RAY_PORT}")
_HEAD_RAYLET: Final = re.compile(r"raylet/raylet .*--head")


@dataclass(frozen=True, slots=True)
class RayMember:
    """One Mac of a cluster file, by the folder that `ray up` fills."""

    folder: Path

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def tables(self) -> Path:
        """Folder of Ray's own tables; removing it makes Ray forget every node and actor."""
        return self.folder / "gcs"

    @property
    def temp_dir(self) -> Path:
        return self.folder / "ray"

    @property
    def started(self) -> Path:
        """File with the fingerprint that the running head was started with."""
        return self.folder / "started"

    @property
    def router_pid(self) -> Path:
        return self.folder / "serve.pid"

    @property
    def driver_environment(self) -> dict[str, str]:
        """Variables for a process that connects to the cluster, such as the router."""
        return {
            **os.environ,
            **member_environment(self.keys),
            "RAY_TMPDIR": str(self.folder),  # keeps Ray's sockets and logs below our folder
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",  # 3.12.1 may talk to 3.12.4
        }

    @property
    def start_environment(self) -> dict[str, str]:
        """Variables for `ray start`, on the head and on workers."""
        return {**self.driver_environment, **START_ENVIRONMENT, "RAY_START_HOOK": START_HOOK}

    @property
    def head_environment(self) -> dict[str, str]:
        """Variables for `ray start --head`."""
        return {
            **self.start_environment,
            **HEALTH_CHECKS,
            SESSION_VARIABLE: SESSION,
            "RAY_enable_autoscaler_v2": "0",  # v2 starts one worker too few (Ray 2.60)
            # On disk, so that nodes survive a restart of the head.
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self.tables),
            # Ray stops waiting for an absent Mac after 15 minutes; wait a year.
            "AUTOSCALER_NODE_START_WAIT_S": "31536000",
        }

    def start_worker(self, head: str) -> bool:
        """Start Ray anew on this Mac and join the head at HOST:PORT; return whether it started."""
        self._stop_ray()
        _make_private(self.temp_dir)
        return self._start_ray([f"--address={head}"], self.start_environment, WORKER_STARTS)

    def start_head(self, cluster_file: Path) -> bool:
        """Start Ray's head and the router unless both run with the present code, file and keys."""
        fingerprint = self._fingerprint(cluster_file)
        if not self._runs(fingerprint):
            self.started.unlink(missing_ok=True)
            self._stop_router()
            self._stop_ray()
            if not self._start_ray_head(cluster_file):
                return False
            write_private(self.started, fingerprint)
        if self._router() is None:
            self._start_router(cluster_file)
        return True

    def is_running(self) -> bool:
        """Return whether the router or any process of this folder's Ray runs."""
        return self._router() is not None or f"{self.temp_dir}/" in _ps("-axwwo", "command=")

    # --- Ray ---------------------------------------------------------------------------------

    def _start_ray_head(self, cluster_file: Path) -> bool:
        # Earlier versions named each session after its time, and stored the cluster's key.
        marker = self.tables / "session_name"
        if not marker.exists() or marker.read_text().strip() != SESSION:
            shutil.rmtree(self.tables, ignore_errors=True)
        _make_private(self.tables, self.folder / "logs", self.temp_dir)
        for folder in (self.tables, self.folder / "logs"):
            close_to_others(folder)  # earlier versions left some files open
        arguments = [
            "--head",
            f"--port={RAY_PORT}",
            "--include-dashboard=false",  # it takes 400 MB, and nothing here needs it
            f"--autoscaling-config={cluster_file}",
        ]
        return self._start_ray(arguments, self.head_environment, HEAD_STARTS)

    def _start_ray(
        self, arguments: Sequence[str], environment: Mapping[str, str], tries: int
    ) -> bool:
        raise_open_files()
        command = [
            *(self._program("ray"), "start", *arguments),
            f"--node-ip-address={own_address()}",
            f"--temp-dir={self.temp_dir}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            # One engine per Mac, and the name by which the Mac is addressed.
            f"--resources={json.dumps({'mlx': 1})}",
            f"--labels=mac={own_name()}",
            "--disable-usage-stats",
        ]
        for _ in range(tries):
            if subprocess.run(command, env=environment, check=False).returncode == 0:
                return True
            self._stop_ray()
            time.sleep(RETRY_S)
        return False

    def _stop_ray(self) -> None:
        """Stop every Ray on this Mac, not only ours."""
        subprocess.run([self._program("ray"), "stop"], check=False)

    def _runs(self, fingerprint: str) -> bool:
        """Return whether Ray's head runs and was started with this fingerprint."""
        if not self.started.exists() or self.started.read_text() != fingerprint:
            return False
        commands = _ps("-axwwo", "command=")
        return all(pattern.search(commands) for pattern in (_GCS_SERVER, _HEAD_RAYLET))

    def _fingerprint(self, cluster_file: Path) -> str:
        """Return a digest of the code, cluster file and keys that a running head depends on."""
        code = (self.folder / "app" / package for package in _CODE)
        files = sorted(path for package in code for path in package.rglob("*.py"))
        digest = hashlib.sha256()
        for path in (*files, cluster_file, *sorted(self.keys.glob("*"))):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    # --- the router ----------------------------------------------------------------------------

    def _start_router(self, cluster_file: Path) -> None:
        """Start the router, which starts a node on every Mac that joins."""
        command = [self._program("macfabric"), "serve", "--address", "auto"]
        command += ["--config", str(cluster_file)]
        with (self.folder / "logs/serve.log").open("a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.driver_environment,
                start_new_session=True,  # it outlives the ssh session
            )
        write_private(self.router_pid, str(process.pid))

    def _stop_router(self) -> None:
        """Let a running router save everything and stop."""
        router = self._router()
        if router is not None:
            send([router], signal.SIGTERM)
            wait_for_exit([router], ROUTER_STOP_S)
        self.router_pid.unlink(missing_ok=True)

    def _router(self) -> ProcessId | None:
        """Return the running router; its pid may belong to another program by now."""
        try:
            pid = int(self.router_pid.read_text())
        except (OSError, ValueError):
            return None
        is_router = SERVE_COMMAND in _ps("-ww", "-p", str(pid), "-o", "command=")
        return identify(pid) if is_router else None

    def _program(self, name: str) -> str:
        return str(self.folder / "venv/bin" / name)


def shipped_member() -> RayMember:
    """Return this Mac as cluster.yaml sets it up."""
    return RayMember(Path(SHIPPED_KEYS).expanduser().parent)


def raise_open_files() -> None:
    """Allow as many open files as macOS grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in OPEN_FILES:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
            return


def own_address() -> str:
    """Return the address that ssh came in on, else that of en0, else this machine's first one."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) > 2:
        return connection[2]
    for command in (["ipconfig", "getifaddr", "en0"], ["hostname", "-I"]):
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if addresses := done.stdout.split():
                return addresses[0]
    message = "this Mac has no network address"
    raise OSError(message)


def own_name() -> str:
    """Return the name of this Mac's node: its host name as a label may spell it."""
    return socket.gethostname().partition(".")[0].lower().replace("_", "-")


def _make_private(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def _ps(*arguments: str) -> str:
    command = ["/bin/ps", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
