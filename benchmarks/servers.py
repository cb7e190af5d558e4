"""Servers started by benchmarks: `macfabric up`, and others with an OpenAI endpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.report import open_directly, say

START_S = 300.0  # for a model of gigabytes, and the first start of a new environment
STOP_S = 60.0
# Settings with which only the benchmark moves agents, and turns do not wait for disks.
UNDISTURBED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "router": {"moves_idle_agents": False},
        "node": {"durability": "none", "popular_bytes": 0},
    }
)
_POLL_S = 0.2
_LOG_TAIL_CHARS = 2_000


class ServerError(RuntimeError):
    """A server did not start, with the end of its log."""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running_server(
    command: Sequence[str],
    url: str,
    health: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for a block of code; raise ServerError if it does not become ready.

    It is ready once the path `health` answers. It runs and logs in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=folder, env=None if env is None else dict(env)
        )
    try:
        _await_health(process, url + health, log)
        yield process
    finally:
        _stop(process)


def _await_health(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            open_directly(address, 2).close()
        except OSError:  # a refused connection, or an HTTP error while the model loads
            is_over = process.poll() is not None or time.monotonic() > deadline_s
        else:
            return
        if is_over:
            tail = log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
            message = f"the server did not start:\n{tail}"
            raise ServerError(message)
        time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Provide a temporary folder with a path short enough for the sockets of Ray."""
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - private to its owner
    with tempfile.TemporaryDirectory(prefix="mf-bench-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def running_fabric(
    model: str, *, nodes: int = 1, data: Path | None = None, settings: Mapping[str, object] = {}
) -> Iterator[str]:
    """Run `macfabric up` with these settings, and yield its address.

    Its data are removed afterwards unless `data` is their folder.
    """
    with short_folder() as folder:
        config = folder / "cluster.yaml"
        config.write_text(json.dumps({"metadata": {"macfabric": dict(settings)}}))
        command = [sys.executable, "-m", "router.cli.main", "up", "--json", "--nodes", str(nodes)]
        command += ["--port", "0", "--data", str(data or folder / "data"), "--model", model]
        command += ["--config", str(config)] if settings else []
        with (folder / "up.log").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            say(f"starting {nodes} node{'s'[: nodes > 1]}")
            yield _ready_url(process, folder / "up.log")
        finally:
            _stop(process)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None, "its output must be a pipe"
    for line in process.stdout:
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("url"):
            return str(event["url"])
    message = f"macfabric up did not start:\n{log.read_text()[-_LOG_TAIL_CHARS:]}"
    raise ServerError(message)
