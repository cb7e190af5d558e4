"""Programs that use one client each, run as by their users, and their reports by feature."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN_S = 300


@dataclass(frozen=True)
class Report:
    """Output of a program: results by feature, errors by feature, and the whole text."""

    results: Mapping[str, Any]
    errors: Mapping[str, str]
    printed: str

    def __getitem__(self, feature: str) -> Any:
        if feature in self.results:
            return self.results[feature]
        raise AssertionError(self.errors.get(feature) or self.printed[-3_000:])


def run_program(command: Sequence[str], url: str, model: str, folder: Path, **more: str) -> Report:
    """Run a program whose environment has only the fabric's address."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "FABRIC_URL": url,
        "FABRIC_MODEL": model,
        **more,
    }
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=False,
        )
        printed = done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode(errors="replace") + f"\nnot done in {RUN_S} s"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"feature"')]
    return Report(
        {line["feature"]: line.get("result") for line in lines if "error" not in line},
        {line["feature"]: line["error"] for line in lines if "error" in line},
        printed,
    )
