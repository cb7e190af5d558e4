"""A real `macfabric up` in its own processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from router.supervise.processes import descendants, wait_for_exit
from tests.support.fabric_process import ALICE, BOB, ROOT, THRIFTY


@dataclass(frozen=True, slots=True)
class Up:
    """A running fabric: its address, its process, and its data folder."""

    url: str
    pid: int
    data: Path

    @property
    def router_pid(self) -> int:
        """Process of the router."""
        [found] = [process.pid for process in descendants([self.pid]) if _is_router(process.pid)]
        return found


@contextmanager
def running_up(
    folder: Path,
    model: str = "recall",
    node: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    names: Sequence[str] = ("node-a",),
) -> Iterator[Up]:
    """Run a fabric for a block of code, with two tenants unless `router` sets others."""
    config, data = folder / "cluster.yaml", folder / "data"
    keyed = {"api_keys": {"alice": ALICE, "bob": BOB}} | dict(router or {})
    settings = {"router": keyed, "node": dict(node or {}), "local_nodes": list(names)}
    config.write_text(yaml.safe_dump({"metadata": {"macfabric": settings}}))
    argv = [sys.executable, "-m", "router.cli.main", "up", "--port", "0"]
    argv += ["--config", str(config), "--data", str(data), "--json", "--model", model]
    with (folder / "log").open("w") as log:
        up = subprocess.Popen(
            argv,
            env=os.environ | THRIFTY | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    owned = []
    try:
        assert up.stdout is not None
        line = up.stdout.readline()
        assert line, (folder / "log").read_text()
        owned = descendants([up.pid])
        yield Up(json.loads(line)["url"], up.pid, data)
    finally:
        up.terminate()
        up.wait(60)
        assert up.stdout is not None
        up.stdout.close()
        assert wait_for_exit(owned, 30.0) == []


def _is_router(pid: int) -> bool:
    argv = ["ps", "-o", "command=", "-p", str(pid)]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False)
    return " -m router " in listed.stdout
