"""`macfabric down --config cluster.yaml`: stop what `ray up` started, on every Mac, by ssh.

`ray down` stops Ray on the head only: the router keeps running, and so do the other Macs' nodes
until they have missed the head for a minute.
"""

import json
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Final

from fabric.errors import FabricError
from fabric.hosting.cluster_file import fabric_section
from fabric.limits import STOP_WAIT_S_MAX
from fabric.settings import parse_settings
from router.cli.config_file import read_cluster_file
from router.cli.errors import FAILED, MISUSED, CommandError
from router.cli.output import Steps, print_table
from router.cli.terminal import print_error, print_json
from router.limits import STOP_LINE_CHARS_MAX, STOPS_AT_ONCE_MAX

PROGRESS_S: Final = 1.0  # between two reads of the progress

_TEXTS: Final = {
    "asked": "asking process {pid} to stop; turns get {wait_s:g} s to end",
    "already_stopping": "already stopping; waiting for its end (`--wait 0` hurries it)",
    "draining": "waiting for running turns: {turns}, up to {left_s:g} s",
    "saving": "stopping the nodes; agents in memory are saved first",
    "stopping_ray": "stopping Ray",
}


class DownProgress:
    """Printer of each state of a stop, with `host` for another machine."""

    def __init__(self, steps: Steps, *, as_json: bool, host: str = "") -> None:
        self._steps = steps
        self._as_json = as_json
        self._host = host
        self._shown: Mapping[str, Any] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """Show a state, unless it is the one that was shown last."""
        if not row or row == self._shown:
            return
        self._shown = row
        if self._as_json:
            print_error(json.dumps({"host": self._host, **row} if self._host else row))
            return
        text = _TEXTS.get(str(row.get("event")))
        if text is not None:
            lead = f"{self._host}: " if self._host else ""
            self._steps.say(lead + text.format_map(row))

    def relay(self, line: str) -> bool:
        """Show a line that `down --json` printed elsewhere; return whether it is progress."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        event = row.get("event") if isinstance(row, dict) else None
        text = _TEXTS.get(event) if isinstance(event, str) else None
        if text is not None:
            names = [name for _, name, _, _ in Formatter().parse(text) if name]
            if all(type(row.get(name)) in (int, float) for name in names):
                self.note({"event": event, **{name: row[name] for name in names}})
        return True


# Where cluster.yaml puts the programs.
PROGRAMS = "~/macfabric/venv/bin"
CONNECT_TIMEOUT_S = 10
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """Result of stopping one Mac."""

    host: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Macs of a cluster file and how to log in to them."""

    head: str
    workers: tuple[str, ...]
    login: tuple[str, ...]  # the ssh command, up to the host
    user: str
    data_dir: str

    def run(
        self,
        host: str,
        command: str,
        timeout_s: float | None = None,
        is_progress: Callable[[str], bool] = lambda _: False,
    ) -> Stopped:
        """Run a shell command on a Mac; return failures instead of raising them.

        Lines of its standard error that `is_progress` accepts are not errors.
        """
        timeout_s = STOP_TIMEOUT_S if timeout_s is None else timeout_s
        argv = [*self.login, "--", f"{self.user}@{host}", command]
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            except FileNotFoundError:
                message = "ssh is not installed on this machine"
                raise CommandError(message) from None
            error, in_time = _follow(process, timeout_s, is_progress)
            if not in_time:
                return Stopped(host, ok=False, detail=f"no answer within {timeout_s:g} s")
            out.seek(0)
            output = (error or out.read(STOP_LINE_CHARS_MAX).strip()).splitlines()
        detail = "stopped" if process.returncode == 0 else (output or ["no reason given"])[-1]
        return Stopped(host, ok=process.returncode == 0, detail=detail)


def _follow(
    process: "subprocess.Popen[str]", timeout_s: float, is_progress: Callable[[str], bool]
) -> tuple[str, bool]:
    """Wait for a process; return its last line of error, and whether it ended in time."""
    expired = threading.Event()

    def end() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(timeout_s, end)
    timer.start()
    last = ""
    try:
        with process:
            assert process.stderr is not None, "it is a pipe"
            while line := process.stderr.readline(STOP_LINE_CHARS_MAX):
                if line.strip() and not is_progress(line):
                    last = line.strip()
    finally:
        timer.cancel()
    return last, not expired.is_set()


def stop_cluster(path: Path, wait_s: float | None = None, *, as_json: bool) -> int:
    """Stop router, nodes and Ray on a cluster file's Macs; return 1 if any could not be stopped."""
    cluster = read_cluster(read_cluster_file(path), path)
    steps = Steps(quiet=as_json)
    steps.say(f"asking the router on {cluster.head} to save everything and stop")
    # The head's processes first: nodes can save their agents only while Ray runs.
    down = f"{PROGRAMS}/macfabric down --json --data {_shell_path(cluster.data_dir)}"
    down += "" if wait_s is None else f" --wait {wait_s:g}"
    longest_s = (STOP_WAIT_S_MAX if wait_s is None else wait_s) + STOP_TIMEOUT_S
    progress = DownProgress(steps, as_json=as_json, host=cluster.head)
    saved = cluster.run(cluster.head, down, longest_s, progress.relay)
    steps.say("stopping Ray on every Mac")
    hosts = [cluster.head, *cluster.workers]
    with ThreadPoolExecutor(min(STOPS_AT_ONCE_MAX, len(hosts))) as pool:
        rows = list(pool.map(lambda host: cluster.run(host, f"{PROGRAMS}/ray stop"), hosts))
    if not saved.ok and rows[0].ok:
        why = saved.detail.removeprefix("macfabric: ")
        rows[0] = Stopped(cluster.head, ok=False, detail=f"its router did not stop: {why}")
    ok = all(row.ok for row in rows)
    if as_json:
        print_json({"ok": ok, "macs": [asdict(row) for row in rows]})
    else:
        print_table("Macs", ("host", "result"), [(row.host, row.detail) for row in rows])
    return 0 if ok else FAILED


def read_cluster(cluster: dict[str, Any], path: Path) -> Cluster:
    """Return the Macs of a cluster file; raise CommandError if it does not name them."""
    provider, auth = cluster.get("provider"), cluster.get("auth")
    provider, auth = (part if isinstance(part, dict) else {} for part in (provider, auth))
    head, workers = provider.get("head_ip"), provider.get("worker_ips")
    user, key = auth.get("ssh_user"), auth.get("ssh_private_key")
    workers = [] if workers is None else workers
    if not isinstance(workers, list) or not _are_words([head, user, *workers]):
        message = f"{path} names no Macs, or no account; see `macfabric config check {path}`"
        raise CommandError(message, MISUSED)
    try:
        data_dir = parse_settings(fabric_section(cluster)).data_dir
    except FabricError as error:
        message = f"{path}: {error.message}"
        raise CommandError(message, MISUSED) from None
    login = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    login += ["-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=ERROR"]
    login += ["-i", str(Path(str(key)).expanduser())] if key else []
    return Cluster(str(head), tuple(map(str, workers)), tuple(login), str(user), data_dir)


def _are_words(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) and value and not value.isspace() for value in values)


def _shell_path(path: str) -> str:
    """Quote a path for the remote shell, which expands a leading ~."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
