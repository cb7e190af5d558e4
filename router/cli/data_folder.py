"""The folder of a local fabric: the only place that `macfabric up` writes to.

cluster.key   shared by nodes and router; without it stored caches are unreadable
ca.pem, …     the certificates that nodes, router and Ray know each other by (key_folder.py)
nodes/NAME/   each node's blocks and manifests
config.yaml   the settings in force        logs/          what every process printed
endpoint.json where clients reach it       run.json       which processes belong to it
stop.json     how long a stop waits for running turns, where `down --wait` says so
runs/         scenarios that the router performs     scenarios/    those of the command line
roster.json   which nodes the fabric had: its next router expects them
operator.key  lets the command line drain, flush and look; new at each start
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fabric.codec import to_plain
from fabric.limits import STOP_WAIT_S_MAX
from fabric.settings import FabricSettings
from router.cli.errors import CommandError
from router.cli.keys.key_folder import KeyFolder
from router.cli.own_folder import own_folder
from router.private_files import close_to_others, write_private
from router.supervise.processes import ProcessId, from_record, to_record
from router.supervise.ray_processes import is_short_dir

KEPT_TEMPORARIES = frozenset({"mlx"})  # what MLX compiles on Linux, seconds a kernel
DATA_VARIABLE = "MACFABRIC_DATA"

OPERATOR_KEY_BYTES = 32


def default_data_dir(settings: FabricSettings | None = None) -> Path:
    """Return where a fabric's data is when no command line says otherwise."""
    chosen = os.environ.get(DATA_VARIABLE) or (settings or FabricSettings()).data_dir
    return Path(chosen).expanduser()


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths and small records below one folder."""

    path: Path

    @property
    def keys(self) -> KeyFolder:
        """The keys of a fabric that runs on this machine alone."""
        return KeyFolder.in_data(self.path)

    @property
    def operator_key(self) -> Path:
        """The key by which this machine's command line is an operator, while a fabric runs."""
        return self.path / "operator.key"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def endpoint(self) -> Path:
        return self.path / "endpoint.json"

    @property
    def run(self) -> Path:
        """Which processes belong to the running fabric."""
        return self.path / "run.json"

    @property
    def stop_request(self) -> Path:
        """How long the stop that `macfabric down --wait` asks for waits for running turns."""
        return self.path / "stop.json"

    @property
    def stop_progress(self) -> Path:
        """How far the stop under way is, for `macfabric down`."""
        return self.path / "stopping.json"

    @property
    def roster(self) -> Path:
        """Which nodes the router has heard, for its successor."""
        return self.path / "roster.json"

    @property
    def router_runs(self) -> Path:
        """What the router writes down of scenarios that it performs."""
        return self.path / "runs"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def create(self) -> None:
        """Make the folder; raise CommandError where it is somebody else's."""
        try:
            for folder in (self.path, self.path / "logs", self.path / "tmp"):
                own_folder(folder)
            close_to_others(self.path / "logs")  # earlier versions left some open
        except OSError as error:
            message = f"{self.path} cannot hold a fabric's data: {error.strerror}"
            raise CommandError(message) from None

    def renew_operator_key(self) -> str:
        """Make the key of the fabric that starts now."""
        key = secrets.token_hex(OPERATOR_KEY_BYTES)
        write_private(self.operator_key, key)
        return key

    def read_operator_key(self) -> str | None:
        """Return the key of the fabric that runs, if it has one that nobody else can read."""
        try:
            if self.operator_key.stat().st_mode & 0o077:
                return None
            return self.operator_key.read_text().strip() or None
        except (OSError, ValueError):
            return None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder; raise CommandError while another process runs a fabric in it."""
        lock = self.path / "lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            message = f"{lock} cannot be locked: {error.strerror}"
            raise CommandError(message) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = (
                    f"A fabric is running in {self.path} already (see `macfabric status`). "
                    "Stop it first with `macfabric down`."
                )
                raise CommandError(message) from None
            yield
        finally:
            os.close(descriptor)

    def environment(self) -> dict[str, str]:
        """Return what keeps other people's libraries from writing elsewhere."""
        return {"HF_HOME": str(self.path / "hf"), "TMPDIR": str(self.path / "tmp")}

    def remove_temporaries(self) -> None:
        """Remove what libraries left in their temporary folder, but for kernels built once."""
        for path in (self.path / "tmp").glob("*"):
            if path.is_dir() and not path.is_symlink():
                if path.name not in KEPT_TEMPORARIES:
                    shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def write_settings(self, settings: FabricSettings) -> None:
        """Write the settings in force, in the form of a cluster file."""
        whole = {"metadata": {"macfabric": to_plain(settings)}}
        write_private(self.config, yaml.safe_dump(whole, sort_keys=False))

    def write_run(
        self,
        up: ProcessId,
        processes: Mapping[str, ProcessId],
        outside: Path | None = None,
        stop_wait_s: float = 0.0,
    ) -> None:
        """Note who runs the fabric, what it started and wrote elsewhere, for `macfabric down`."""
        record = {
            "up": to_record(up),
            "processes": {name: to_record(process) for name, process in processes.items()},
            "outside": str(outside) if outside else None,
            "stop_wait_s": stop_wait_s,
        }
        write_private(self.run, json.dumps(record, indent=1))

    def read_run(self) -> tuple[ProcessId | None, dict[str, ProcessId]]:
        """Return who runs the fabric and its processes, as last noted."""
        record = read_json(self.run)
        listed = record.get("processes")
        processes = {
            str(name): process
            for name, value in (listed if isinstance(listed, dict) else {}).items()
            if (process := from_record(value)) is not None
        }
        return from_record(record.get("up")), processes

    def write_stop_wait(self, wait_s: float) -> None:
        """Note how long the next stop waits for running turns."""
        write_private(self.stop_request, json.dumps({"wait_s": wait_s}))

    def read_stop_wait(self, default_s: float) -> float:
        """Return what `write_stop_wait` noted, or the default."""
        wait_s = read_json(self.stop_request).get("wait_s")
        if not isinstance(wait_s, int | float):
            return default_s
        return min(max(0.0, float(wait_s)), STOP_WAIT_S_MAX)

    def read_run_wait(self) -> float:
        """Return how long the fabric that runs waits for turns when nothing else is asked for."""
        wait_s = read_json(self.run).get("stop_wait_s")
        return float(wait_s) if isinstance(wait_s, int | float) else STOP_WAIT_S_MAX

    def write_stop_progress(self, row: Mapping[str, Any]) -> None:
        """Note how far the stop under way is; a full disk is no reason not to stop."""
        with contextlib.suppress(OSError):
            write_private(self.stop_progress, json.dumps(row))

    def read_stop_progress(self) -> dict[str, Any]:
        """Return what `write_stop_progress` noted; empty while no stop is under way."""
        return read_json(self.stop_progress)

    def forget_run(self) -> None:
        """Remove the records of a fabric that no longer runs, and what it wrote elsewhere."""
        outside = read_json(self.run).get("outside")
        if isinstance(outside, str) and is_short_dir(Path(outside)):
            shutil.rmtree(outside, ignore_errors=True)
        self.endpoint.unlink(missing_ok=True)
        self.operator_key.unlink(missing_ok=True)
        self.run.unlink(missing_ok=True)
        self.stop_request.unlink(missing_ok=True)
        self.stop_progress.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a small record; a missing or damaged one is empty."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
