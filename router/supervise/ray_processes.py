"""A Ray cluster on this machine: one real `ray start --block` per node, each with its own name.

Everything it writes is below one folder, unless that folder's path is too long for Ray's
sockets. It has a password of its own, so other Ray clusters on the machine do not interfere.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fabric.ids import NodeName
from fabric.keys import AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE, MEMBER_KEY, RAY_TOKEN
from router.limits import LOG_BYTES_MAX
from router.private_files import close_to_others, write_private
from router.supervise.failures import new_errors, ray_failure, raylet_logs
from router.supervise.keeper import Keeper

OBJECT_STORE_BYTES = (
    80_000_000  # Ray carries control messages, never KV blocks; 75 MiB is its least
)
# Linux calls 107 bytes a socket path, macOS 103; Ray puts 45 below the folder it is given.
SOCKET_PATH_BYTES_MAX = 103
SOCKET_SUFFIX_BYTES = len("/node/s1234567/sockets/plasma_store.1")
SHORT_DIR_PREFIX = "macfabric-ray-"
SESSION_VARIABLE = "MACFABRIC_RAY_SESSION"
STARTED_MARK = "Ray runtime started."
STOP_GRACE_S = 5.0
RAYLET_START_S = 1_200.0  # while the processes that it started live
_RAYLET_POLL_S = 0.5
_DEAD_CHILD_POLL_S = 2.0
_PORT_TRIES = 64
_SERVERS = ("raylet", "gcs_server")


@dataclass(frozen=True, slots=True)
class RayNode:
    """One Ray node of this machine."""

    name: NodeName
    host: str
    process: str  # the keeper's name for it
    temp_dir: Path
    log: Path


def trim_ray_start(ray_params: Any, head: bool) -> None:  # noqa: FBT001 - Ray calls it
    """Change the parameters of `ray start`, which calls this by RAY_START_HOOK.

    No Ray Client server: nothing here uses it, and it runs code for any client. A short session
    name: sockets lie below it, and their paths are bounded.
    """
    ray_params.ray_client_server_port = None
    services = sys.modules.get("ray._private.services")
    if services is not None:
        _wait_longer_for_raylet(services)
    if head:
        # The same name after a restart, or the head would not accept its stored tables.
        ray_params.session_name = os.environ.get(SESSION_VARIABLE, f"s{os.getpid()}")


def _wait_longer_for_raylet(services: Any) -> None:
    """Wait longer for the raylet of a busy machine than the 30 seconds that Ray allows.

    Starting again would only make the machine busier.
    """
    ask = services.get_node

    def ask_patiently(gcs_address: str, node_id: str) -> Any:
        deadline_s, look_at_s = time.monotonic() + RAYLET_START_S, 0.0
        while True:
            try:
                return ask(gcs_address, node_id)
            except Exception as error:  # noqa: BLE001 - not there yet, or its tables are slow
                now_s = time.monotonic()
                dead = ""
                if now_s >= look_at_s:
                    dead = _dead_server()
                    look_at_s = now_s + _DEAD_CHILD_POLL_S
                if now_s > deadline_s or dead:
                    what = f"{dead} ended" if dead else "the raylet did not register in time"
                    message = f"{what}: {error}"
                    raise SystemExit(message) from None
                time.sleep(_RAYLET_POLL_S)

    services.get_node = ask_patiently


def _dead_server() -> str:
    """Return the name of a Ray server that this process started and that has ended, or "".

    Other children may end: they are helpers that have not been reaped yet.
    """
    command = ["/bin/ps", "-axo", "ppid=,stat=,comm="]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        parent, state, name = (*line.split(None, 2), "", "")[:3]
        if parent == str(os.getpid()) and state.startswith("Z"):
            server_name = next((server for server in _SERVERS if server in name), "")
            if server_name:
                return server_name
    return ""


def member_environment(keys: Path) -> dict[str, str]:
    """Return the variables that every process of a fabric's Ray cluster must agree on.

    `keys` is the folder that holds Ray's token and the certificates.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(keys / RAY_TOKEN),
        # Ray refuses a peer without a certificate of this fabric.
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(keys / MEMBER_CERTIFICATE),
        "RAY_TLS_SERVER_KEY": str(keys / MEMBER_KEY),
        "RAY_TLS_CA_CERT": str(keys / AUTHORITY_CERTIFICATE),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # without it, Ray refuses a second Mac
        # Nodes and routers outlive a lost head for a day. By default they end after a minute, in
        # which a busy machine may not have restarted its own.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        # A driver that lost its cluster would otherwise start another one in its own process.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 slows token generation
    }


# For `ray start` and the processes that it starts, on every machine.
START_ENVIRONMENT: Final = {
    # Each question for the raylet ends soon, so that `ask_patiently` sees one that has ended. A
    # raylet does so by itself where its agents take more than 15 seconds to start.
    "RAY_raylet_start_wait_time_s": "2",
    "RAY_enable_metrics_collection": "0",  # its exporters serve every interface without a password
    "DASHBOARD_METRIC_PORT": "-1",  # likewise
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),  # includes what nodes print
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
# A Ray that refuses connections is dead after 5 s instead of 15; a busy one still has a minute.
HEALTH_CHECKS: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_initial_delay_ms": "1000",
}
START_HOOK: Final = f"{__name__}.{trim_ray_start.__name__}"


def ray_environment(keys: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every node and driver of a local cluster, on top of `base`."""
    # Without compiled files each process compiles the same thousands of modules again.
    inherited = {
        key: value
        for key, value in base.items()
        if not key.startswith("RAY_") and key != "PYTHONDONTWRITEBYTECODE"
    }
    return {
        **inherited,
        **member_environment(keys),
        **START_ENVIRONMENT,
        **HEALTH_CHECKS,
        "PYTHONPATH": os.pathsep.join(filter(None, (_source_root(), base.get("PYTHONPATH")))),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A busy machine takes minutes for what Ray allows 20 to 60 s: connecting to the head (one
        # try a second, or two), and the registrations of agents, workers and raylets.
        "RAY_NUM_REDIS_GET_RETRIES": "600",
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_raylet_start_wait_time_s": "600",
        "RAY_memory_monitor_refresh_ms": "0",  # memory full of KV is no reason to kill the engine
        # SIGTERM would otherwise wait half a minute for actors that never go idle.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def _source_root() -> str:
    return str(Path(__file__).resolve().parents[2])


def loopback_hosts(count: int) -> list[str]:
    """Return one loopback address per node where the system has many, else 127.0.0.1 for all.

    127.0.0.1 itself is left out where it can be: Ray replaces it by the machine's own address.
    """
    hosts = [f"127.0.0.{index + 2}" for index in range(count)]
    return hosts if all(map(_is_local, hosts)) else ["127.0.0.1"] * count


def _is_local(host: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """Find a port that is free now, below the range that outgoing connections use."""
    for _ in range(_PORT_TRIES):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))  # noqa: S104 - Ray's GCS binds every address
            except OSError:
                continue
        return port
    message = f"no free port on {host}"
    raise OSError(message)


class LocalRay:
    """The `ray start` processes of one fabric, owned by a keeper."""

    def __init__(self, folder: Path, names: Sequence[NodeName], keeper: Keeper) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keeper = keeper
        self.short_dir = _short_dir(folder)  # used where `folder` is too long, else None
        self._base = base = self.short_dir or folder / "ray"
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(mode=0o700)
        self._token = folder / RAY_TOKEN
        write_private(self._token, secrets.token_hex(32))
        logs = folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        self.nodes = tuple(
            RayNode(name, host, f"ray-{name}", base / f"n{i}", logs / f"ray-{name}.log")
            for i, (name, host) in enumerate(zip(names, loopback_hosts(len(names)), strict=True))
        )
        self.address = f"{self.nodes[0].host}:{free_port(self.nodes[0].host)}"
        self.environment = ray_environment(folder, os.environ)
        self._session = f"s{os.getpid()}"
        self._errors_before: dict[str, dict[Path, int]] = {}  # of raylets, at each node's start

    def start(self) -> None:
        """Start all nodes at once; workers wait for the head by themselves."""
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: RayNode) -> None:
        """Start a node, or restart one that has ended."""
        node.log.unlink(missing_ok=True)
        self._errors_before[node.process] = raylet_logs(node.temp_dir)
        environment = self.environment | START_ENVIRONMENT | {"RAY_START_HOOK": START_HOOK}
        if self.is_head(node):
            # On disk, so that nodes and actors outlive the head and rejoin it.
            tables = self._base / "gcs"
            tables.mkdir(mode=0o700, exist_ok=True)
            # Ray mistakes waiting raylets of this machine for a running head.
            (node.temp_dir / "ray_current_cluster").unlink(missing_ok=True)
            environment |= {
                SESSION_VARIABLE: self._session,
                "RAY_gcs_storage": "rocksdb",
                "RAY_gcs_storage_path": str(tables),
            }
        self._keeper.start(node.process, self._command(node), environment, node.log, bounded=False)

    def find(self, process: str) -> RayNode | None:
        return next((node for node in self.nodes if node.process == process), None)

    def is_head(self, node: RayNode) -> bool:
        """Return whether this node runs Ray's own tables, which the others need within a minute."""
        return node is self.nodes[0]

    def has_started(self, node: RayNode) -> bool:
        return STARTED_MARK in read_log(node.log)

    def end_reason(self, node: RayNode) -> str:
        """Return why a node ended, or "" where its logs lack the reason."""
        try:
            raylet = new_errors(node.temp_dir, self._errors_before.get(node.process, {}))
        except OSError:
            raylet = ""
        return ray_failure(read_log(node.log), raylet)

    def stop(self) -> None:
        """End every node and remove what Ray wrote."""
        self._keeper.end([node.process for node in self.nodes], STOP_GRACE_S)
        self.remove_files()

    def remove_files(self) -> None:
        """Remove Ray's own files and the password; keep its logs."""
        for node in self.nodes:
            printed = node.temp_dir / "session_latest" / "logs"
            if printed.is_dir():
                kept = node.log.with_suffix("")
                shutil.rmtree(kept, ignore_errors=True)
                shutil.move(printed.resolve(), kept)
                close_to_others(kept)  # Ray creates its folders with open modes
        shutil.rmtree(self._base, ignore_errors=True)
        self._token.unlink(missing_ok=True)

    def _command(self, node: RayNode) -> list[str]:
        port = self.address.rpartition(":")[2]
        if self.is_head(node):
            role = ["--head", f"--port={port}", "--no-monitor"]
            role += ["--include-dashboard=false", "--dashboard-port=0"]
        else:
            role = [f"--address={self.address}"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            f"--node-ip-address={node.host}",
            f"--temp-dir={node.temp_dir}",
            f"--labels=mac={node.name}",
            f"--resources={json.dumps({'mlx': 1})}",
            "--num-cpus=1",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            # Chosen by the system: fixed ports would collide with a second fabric.
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
        ]


def read_log(path: Path) -> str:
    """Return a log's text, empty if there is no log yet."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _short_dir(folder: Path) -> Path | None:
    room = SOCKET_PATH_BYTES_MAX - SOCKET_SUFFIX_BYTES - len(os.fsencode(folder / "ray"))
    if room >= 0:
        return None
    # Not $TMPDIR, which is long on macOS.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - mkdtemp makes it 0700
    return Path(tempfile.mkdtemp(prefix=SHORT_DIR_PREFIX, dir=parent))


def is_short_dir(path: Path) -> bool:
    """Return whether a path from a crashed fabric's record is a folder that `_short_dir` makes."""
    is_ours = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
    return is_ours and path.is_absolute() and path.name.startswith(SHORT_DIR_PREFIX)
