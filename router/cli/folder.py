"""The folder of a local fabric: the only place that `macfabric up` writes to.

cluster.key   shared by nodes and router; without it stored memory is unreadable
nodes/NAME/   each node's blocks and manifests
config.yaml   the settings in force        logs/          what every process printed
endpoint.json where clients reach it       run.json       which processes belong to it
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
from fabric.settings import FabricSettings
from router.cli.errors import CommandError
from router.processes import ProcessId, from_record, to_record
from router.ray_processes import is_short_dir

KEY_BYTES = 32
DATA_VARIABLE = "MACFABRIC_DATA"


def default_data_dir(settings: FabricSettings | None = None) -> Path:
    """Return where a fabric's data is when no command line says otherwise."""
    chosen = os.environ.get(DATA_VARIABLE) or (settings or FabricSettings()).data_dir
    return Path(chosen).expanduser()


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths and small records below one folder."""

    path: Path

    @property
    def cluster_key(self) -> Path:
        """The cluster's key."""
        return self.path / "cluster.key"

    @property
    def config(self) -> Path:
        """The settings in force."""
        return self.path / "config.yaml"

    @property
    def endpoint(self) -> Path:
        """Where clients reach the running fabric."""
        return self.path / "endpoint.json"

    @property
    def run(self) -> Path:
        """Which processes belong to the running fabric."""
        return self.path / "run.json"

    def log(self, name: str) -> Path:
        """Where the process called `name` prints to."""
        return self.path / "logs" / f"{name}.log"

    def create(self) -> None:
        """Make the folder and its key where they are missing."""
        try:
            for folder in (self.path, self.path / "logs", self.path / "tmp"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.cluster_key.exists():
                write_private(self.cluster_key, secrets.token_hex(KEY_BYTES))
        except OSError as error:
            message = f"{self.path} cannot hold a fabric's data: {error.strerror}"
            raise CommandError(message) from None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder; raise CommandError while another process runs a fabric in it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"A fabric is running in {self.path} already (see `macfabric status`)."
                raise CommandError(message) from None
            yield
        finally:
            os.close(descriptor)

    def environment(self) -> dict[str, str]:
        """Return what keeps other people's libraries from writing elsewhere."""
        return {"HF_HOME": str(self.path / "hf"), "TMPDIR": str(self.path / "tmp")}

    def write_settings(self, settings: FabricSettings) -> None:
        """Write the settings in force, in the form of a cluster file."""
        whole = {"metadata": {"macfabric": to_plain(settings)}}
        write_private(self.config, yaml.safe_dump(whole, sort_keys=False))

    def write_run(
        self, up: ProcessId, processes: Mapping[str, ProcessId], outside: Path | None = None
    ) -> None:
        """Note who runs the fabric, what it started and wrote elsewhere, for `macfabric down`."""
        record = {
            "up": to_record(up),
            "processes": {name: to_record(process) for name, process in processes.items()},
            "outside": str(outside) if outside else None,
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

    def forget_run(self) -> None:
        """Remove the records of a fabric that no longer runs, and what it wrote elsewhere."""
        outside = read_json(self.run).get("outside")
        if isinstance(outside, str) and is_short_dir(Path(outside)):
            shutil.rmtree(outside, ignore_errors=True)
        self.endpoint.unlink(missing_ok=True)
        self.run.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a small record; a missing or damaged one is empty."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
