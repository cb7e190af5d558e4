"""Data folder of a local fabric: the only place that `macfabric up` writes to.

cluster.key   shared by nodes and router; without it stored caches are unreadable
ca.pem, …     certificates of nodes, router and Ray (key_folder.py)
nodes/NAME/   each node's blocks and manifests
config.yaml   the settings in force        logs/          what every process printed
settings.json where they come from, without keys, for `macfabric config show`
endpoint.json the URL of the router        run.json       the processes of the fabric
stop.json     seconds that a stop waits for running turns, set by `down --wait`
runs/         scenarios that the router performs     scenarios/    those of the command line
upgrade.json  the node that `macfabric upgrade` has drained
roster.json   nodes of the fabric, which its next router expects
usage.json    what each tenant used, by hour and day
launch/       files with a model's limits, for programs that `launch` starts
operator.key  operator key of the command line; new at each start
watch.key     key for metrics, nodes and events only; stays
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fabric.codec import to_plain
from fabric.hosting.log_files import LOGS_FOLDER
from fabric.limits import STOP_WAIT_S_MAX
from fabric.settings import FabricSettings
from router.cli.errors import CommandError
from router.cli.keys import KeyFolder
from router.private_files import close_to_others, write_private
from router.supervise.processes import ProcessId, from_record, to_record
from router.supervise.ray_processes import is_short_dir

KEPT_TEMPORARIES = frozenset({"mlx"})  # kernels that MLX compiles on Linux, seconds each
DATA_VARIABLE = "MACFABRIC_DATA"

OPERATOR_KEY_BYTES = 32
WATCH_KEY = "watch.key"
_SETTING_ROWS = "settings.json"
DEMO_PREFIX = "macfabric-demo-"  # of the names of a demo's data folders


def default_data_dir(settings: FabricSettings | None = None) -> Path:
    """Return the data folder that is used unless a command line names another one."""
    chosen = os.environ.get(DATA_VARIABLE) or (settings or FabricSettings()).data_dir
    return Path(chosen).expanduser()


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths and small records below one folder."""

    path: Path

    @property
    def keys(self) -> KeyFolder:
        """Keys of a fabric that runs on this machine alone."""
        return KeyFolder.in_data(self.path)

    @property
    def operator_key(self) -> Path:
        """Operator key of this machine's command line while a fabric runs."""
        return self.path / "operator.key"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def endpoint(self) -> Path:
        return self.path / "endpoint.json"

    @property
    def run(self) -> Path:
        """Record of the running fabric's processes."""
        return self.path / "run.json"

    @property
    def stop_request(self) -> Path:
        """Seconds that the next stop waits for running turns, set by `macfabric down --wait`."""
        return self.path / "stop.json"

    @property
    def stop_progress(self) -> Path:
        """Progress of the current stop, read by `macfabric down`."""
        return self.path / "stopping.json"

    @property
    def upgrade(self) -> Path:
        """Node that `macfabric upgrade` has drained, until it takes agents again."""
        return self.path / "upgrade.json"

    @property
    def usage(self) -> Path:
        """File with what each tenant used."""
        return self.path / "usage.json"

    @property
    def roster(self) -> Path:
        """Nodes that have reported to the router, for the next router."""
        return self.path / "roster.json"

    @property
    def router_runs(self) -> Path:
        """Records of the router's scenario runs."""
        return self.path / "runs"

    @property
    def logs(self) -> Path:
        """Output of every process, and the log files of router and nodes."""
        return self.path / LOGS_FOLDER

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Make the folder; raise CommandError if another user owns it."""
        try:
            for folder in (self.path, self.logs, self.path / "tmp"):
                make_private_folder(folder)
            close_to_others(self.logs)  # earlier versions left some files open
        except OSError as error:
            message = f"{self.path} cannot hold a fabric's data: {error.strerror}"
            raise CommandError(message) from None

    def renew_operator_key(self) -> str:
        """Make and return a new operator key."""
        key = secrets.token_hex(OPERATOR_KEY_BYTES)
        write_private(self.operator_key, key)
        return key

    def read_operator_key(self) -> str | None:
        """Return the running fabric's operator key unless others can read the file."""
        try:
            if self.operator_key.stat().st_mode & 0o077:
                return None
            return self.operator_key.read_text().strip() or None
        except (OSError, ValueError):
            return None

    def watch_key(self) -> str | None:
        """Return the monitoring key, which outlives restarts; create it if there is none.

        None if others can read it, or it cannot be written.
        """
        path = self.path / WATCH_KEY
        with contextlib.suppress(OSError, ValueError):
            if not path.exists():
                write_private(path, secrets.token_hex(OPERATOR_KEY_BYTES))
            if not path.stat().st_mode & 0o077:
                return path.read_text().strip() or None
        return None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder; raise CommandError while another process runs a fabric in it."""
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
        """Return variables that keep libraries from writing elsewhere."""
        return {"HF_HOME": str(self.path / "hf"), "TMPDIR": str(self.path / "tmp")}

    def remove_temporaries(self) -> None:
        """Remove the libraries' temporary files, except compiled kernels."""
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

    def write_setting_rows(self, rows: list[dict[str, Any]]) -> None:
        """Record the settings in force, without keys, and the origin of each."""
        write_private(self.path / _SETTING_ROWS, json.dumps({"rows": rows}, default=str))

    def read_setting_rows(self) -> list[dict[str, Any]]:
        """Read the rows of `write_setting_rows`; raise CommandError without a record."""
        rows = read_json(self.path / _SETTING_ROWS).get("rows")
        if not isinstance(rows, list):
            message = f"{self.path} has no record of its settings: restart the fabric"
            raise CommandError(message)
        return rows

    def write_run(
        self,
        up: ProcessId,
        processes: Mapping[str, ProcessId],
        outside: Path | None = None,
        stop_wait_s: float = 0.0,
    ) -> None:
        """Record the fabric's processes and its folder elsewhere, for `macfabric down`."""
        record = {
            "up": to_record(up),
            "processes": {name: to_record(process) for name, process in processes.items()},
            "outside": str(outside) if outside else None,
            "stop_wait_s": stop_wait_s,
        }
        write_private(self.run, json.dumps(record, indent=1))

    def read_run(self) -> tuple[ProcessId | None, dict[str, ProcessId]]:
        """Return the recorded process of `up` and the processes that it started."""
        record = read_json(self.run)
        listed = record.get("processes")
        processes = {
            str(name): process
            for name, value in (listed if isinstance(listed, dict) else {}).items()
            if (process := from_record(value)) is not None
        }
        return from_record(record.get("up")), processes

    def write_stop_wait(self, wait_s: float) -> None:
        """Set how long the next stop waits for running turns."""
        write_private(self.stop_request, json.dumps({"wait_s": wait_s}))

    def read_stop_wait(self, default_s: float) -> float:
        """Return the wait that `write_stop_wait` set, or the default."""
        wait_s = read_json(self.stop_request).get("wait_s")
        if not isinstance(wait_s, int | float):
            return default_s
        return min(max(0.0, float(wait_s)), STOP_WAIT_S_MAX)

    def read_run_wait(self) -> float:
        """Return how long the running fabric's stop waits for turns by default."""
        wait_s = read_json(self.run).get("stop_wait_s")
        return float(wait_s) if isinstance(wait_s, int | float) else STOP_WAIT_S_MAX

    def write_stop_progress(self, row: Mapping[str, Any]) -> None:
        """Record the progress of the current stop; a full disk must not prevent the stop."""
        with contextlib.suppress(OSError):
            write_private(self.stop_progress, json.dumps(row))

    def read_stop_progress(self) -> dict[str, Any]:
        """Return the last progress of the current stop; empty while none is in progress."""
        return read_json(self.stop_progress)

    def forget_run(self) -> None:
        """Remove the records of a fabric that has ended, and its folder elsewhere."""
        outside = read_json(self.run).get("outside")
        if isinstance(outside, str) and is_short_dir(Path(outside)):
            shutil.rmtree(outside, ignore_errors=True)
        self.endpoint.unlink(missing_ok=True)
        self.operator_key.unlink(missing_ok=True)
        self.run.unlink(missing_ok=True)
        self.stop_request.unlink(missing_ok=True)
        self.stop_progress.unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder for its owner only; raise CommandError if others own it or may write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        message = (
            f"{path} belongs to, or may be written by, other users, who may have put files there: "
            "name another folder, or look at what is in it and `chmod 700` it"
        )
        raise CommandError(message)
    path.chmod(stat.S_IRWXU)


def size_of(path: Path, files_max: int) -> tuple[int, int]:
    """Return number and bytes of the files below a folder, or of one file, up to a number of them.

    Links count as what they are, and are not followed.
    """
    count = size_bytes = 0
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return 1, status.st_size
    for directory, _, files in os.walk(path):
        for name in files:
            if count >= files_max:
                return count, size_bytes
            with contextlib.suppress(OSError):
                size_bytes += (Path(directory) / name).lstat().st_size
                count += 1
    return count, size_bytes


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file; return an empty record if it is missing or damaged."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
