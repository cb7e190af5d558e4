"""Clients installed as by their users: from the registry, each in its own folder.

Third-party files that tests read are installed likewise.

The folders are kept between runs (MACFABRIC_CLIENTS says where), named after what is in them.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

INSTALL_S = 1_800
HERE = Path(__file__).parent


@cache
def versions() -> dict[str, dict[str, list[str]]]:
    """Read the packages of each client."""
    return tomllib.loads((HERE / "versions.toml").read_text())


def python_of(group: str) -> Path:
    """Return the Python of a virtual environment that has these packages."""
    packages = versions()["python"][group]

    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder / "venv")], group)
        python, uv = str(folder / "venv" / "bin" / "python"), shutil.which("uv")
        pip = [python, "-m", "pip"] if uv is None else [uv, "pip"]  # uv is much faster
        into = [] if uv is None else ["--python", python]
        _run([*pip, "install", "--quiet", *into, *packages], group)

    return _folder(group, packages, install) / "venv" / "bin" / "python"


def npm_folder(group: str) -> Path:
    """Return a folder whose node_modules has these packages."""
    npm, packages = shutil.which("npm"), versions()["npm"][group]
    if npm is None:
        pytest.skip("npm is not installed")

    def install(folder: Path) -> None:
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        _run([npm, "install", *quiet, "--prefix", str(folder), *packages], group)

    return _folder(group, packages, install)


def wheel_folder(group: str) -> Path:
    """Return a folder with the files of a wheel, none of which is run."""
    packages = versions()["wheels"][group]

    def install(folder: Path) -> None:
        whole = ["--no-deps", "--only-binary=:all:", "--target", str(folder)]
        _run([sys.executable, "-m", "pip", "install", "--quiet", *whole, *packages], group)

    return _folder(group, packages, install)


def _folder(group: str, packages: list[str], install) -> Path:
    home = os.environ.get("MACFABRIC_CLIENTS")
    base = Path(home) if home else Path(tempfile.gettempdir()) / f"macfabric-clients-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = sha256(" ".join([*packages, sys.version]).encode()).hexdigest()[:12]
    folder, whole = base / f"{group}-{digest}", base / f"{group}-{digest}.whole"
    with (base / f"{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes may install it, too
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            install(folder)
            whole.touch()
    return folder


def _run(command: list[str], group: str) -> None:
    """Run an installation; skip the test if the registry is unreachable."""
    try:
        done = subprocess.run(
            ["nice", *command], capture_output=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{group} was not installed within {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"{group} cannot be installed: {done.stderr.decode()[-300:]}")
