"""Servers of other projects that serve a model folder, each in its own environment."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import say

ENVIRONMENTS = Path("~/.cache/macfabric/peers")
INSTALL_S = 3_600.0  # some build from source
_LOG_TAIL_CHARS = 300

Command = Callable[[Path, Path, int], list[str]]  # of the environment, the model and a port


class PeerUnavailableError(RuntimeError):
    """A peer cannot run on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Server to compare with: its installation and its start."""

    command: Command
    requirements: tuple[str, ...] = ()  # none: it is in our own environment
    unwanted: tuple[str, ...] = ()  # dependencies of it that break it
    health: str = "/v1/models"
    model: Callable[[Path], str] = field(default=str)  # in requests
    variables: Mapping[str, str] = field(default_factory=dict)
    file: str = ""  # needed in the folder of the model
    reason: str = ""  # why it cannot run on this system


def _module(*words: str) -> Command:
    def command(folder: Path, model: Path, port: int) -> list[str]:
        python = str(_python(folder)) if folder.exists() else sys.executable
        return [python, "-m", *(word.format(model=model, port=port) for word in words)]

    return command


def _script(name: str, *words: str) -> Command:
    def command(folder: Path, model: Path, port: int) -> list[str]:
        script = str(_python(folder).with_name(name))
        return [script, *(word.format(model=model, port=port) for word in words)]

    return command


_MLX_LM = ("mlx_lm", "server", "--model", "{model}", "--port", "{port}")
_CPU = () if sys.platform == "darwin" else ("mlx[cpu]",)

OURS = "macfabric"
PEERS: dict[str, Peer] = {
    OURS: Peer(
        _module(
            *("router.cli.main", "up", "--nodes", "1", "--model", "{model}"),
            *("--port", "{port}", "--data", "data"),
        ),
        health="/healthz",
        model=lambda folder: folder.name,
    ),
    "mlx_lm.server": Peer(_module(*_MLX_LM)),
    "mlx_lm.server, 4-bit cache": Peer(
        _module(*_MLX_LM, "--kv-bits", "4", "--quantized-kv-start", "0")
    ),
    "vllm-mlx": Peer(
        _script("vllm-mlx", "serve", "{model}", "--port", "{port}", "--continuous-batching"),
        requirements=(*_CPU, "vllm-mlx"),
        unwanted=("torchvision",),
        health="/health",
    ),
    "Rapid-MLX": Peer(
        _script("rapid-mlx", "serve", "{model}", "--port", "{port}"),
        requirements=(*_CPU, "rapid-mlx"),
        health="/health",
        variables={"RAPID_MLX_TELEMETRY": "0"},
    ),
    "mlx-vlm": Peer(
        _module("mlx_vlm.server", "--model", "{model}", "--port", "{port}"),
        requirements=(*_CPU, "mlx-vlm"),
        health="/health",
        variables={"APC_ENABLED": "1"},  # its prefix cache, which is off by default
    ),
    "llama.cpp": Peer(
        _module(
            *("llama_cpp.server", "--model", "{model}/model.gguf", "--port", "{port}"),
            *("--n_ctx", "65536", "--cache", "true"),
        ),
        requirements=("llama-cpp-python[server]",),
        file="model.gguf",
    ),
    "oMLX": Peer(_module(), reason="it runs on macOS only, and is not on the Python package index"),
}


def require_readable(name: str, model: Path) -> None:
    """Raise PeerUnavailableError if a peer needs a file that a model folder lacks."""
    file = PEERS[name].file
    if file and not (model / file).exists():
        message = f"it reads GGUF only: put {file} into the folder of the model"
        raise PeerUnavailableError(message)


def environment_of(name: str, folder: Path, *, installs: bool) -> Path:
    """Return the environment of a peer, created if `installs`; without a folder, ours.

    Raise PeerUnavailableError if it cannot run here.
    """
    peer, environment = PEERS[name], folder.expanduser() / name.replace(" ", "-")
    if peer.reason:
        raise PeerUnavailableError(peer.reason)
    if not peer.requirements or (environment / "ready").exists():
        return environment
    if not installs:
        message = "its environment is missing: --install makes it"
        raise PeerUnavailableError(message)
    say(f"{name}: installing {' '.join(peer.requirements)}")
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    _pip(environment, "install", *peer.requirements)
    if peer.unwanted:
        _pip(environment, "uninstall", "-y", *peer.unwanted)
    (environment / "ready").touch()
    return environment


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _pip(folder: Path, *words: str) -> None:
    command = [str(_python(folder)), "-m", "pip", *words, "--quiet"]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"installing it took longer than {INSTALL_S:.0f} s"
        raise PeerUnavailableError(message) from error
    if ran.returncode:
        message = f"installing it failed: {ran.stderr.strip()[-_LOG_TAIL_CHARS:]}"
        raise PeerUnavailableError(message)


def variables(name: str, home: Path) -> dict[str, str]:
    """Return the environment variables of a peer, whose caches lie in its own home."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    checkout = Path(__file__).resolve().parents[1]
    own = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)}
    return {**kept, **own, **PEERS[name].variables}
