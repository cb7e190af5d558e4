"""The import rules hold, and each of them reports a violation."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What the toy tree contains -> the contracts that must break (None: all are kept).
CASES = {
    "a tree that keeps the rules": (
        {"node/turn/x.py": "import fabric", "router/turns/x.py": "import fabric"},
        None,
    ),
    "Ray and MLX where they may enter": (
        {
            "node/ray_actor.py": "import ray",
            "node/launch.py": "import ray",
            "node/mlx/__init__.py": "import mlx.core",
            "node/mlx/engine.py": "import mlx.nn\nimport mlx_lm.models.cache",
            "router/fleet/ray_control.py": "import ray",
            "router/supervise/ray_config.py": "import ray.cluster_utils",
            "node/__main__.py": "import node.ray_actor\nimport node.mlx.engine",
        },
        None,
    ),
    "router imports node": (
        {"router/turns/x.py": "from node.turn import y", "node/turn/y.py": ""},
        "node and",
    ),
    "node imports router": ({"node/turn/x.py": "import router"}, "node and router"),
    "fabric imports node": ({"fabric/kvcache/x.py": "import node"}, "node and router"),
    "fabric imports router": ({"fabric/kvcache/x.py": "import router"}, "node and router"),
    "fabric opens a socket": (
        {"fabric/kvcache/x.py": "from socket import socket"},
        "fabric and placement have no I/O",
    ),
    "fabric reads the clock": (
        {"fabric/kvcache/x.py": "import time"},
        "fabric and placement have no I/O",
    ),
    "fabric touches files": (
        {"fabric/kvcache/x.py": "import os.path"},
        "fabric and placement have no I/O",
    ),
    "fabric collects garbage": (
        {"fabric/kvcache/x.py": "import gc"},
        "fabric and placement have no I/O",
    ),
    "fabric opens paths": (
        {"fabric/record/x.py": "from pathlib import Path"},
        "fabric and placement have no I/O",
    ),
    "fabric serves HTTP": (
        {"fabric/net/x.py": "import uvicorn"},
        "fabric and placement have no I/O",
    ),
    "fabric's hosting room may": (
        {
            "fabric/hosting/x.py": "import asyncio\nimport gc\nimport time\nimport uvicorn",
            "node/service.py": "import fabric.hosting.x",
        },
        None,
    ),
    "fabric stands on its hosting room": (
        {"fabric/net/x.py": "import fabric.hosting"},
        "fabric's rooms",
    ),
    "a decision that reads the clock": (
        {"node/tiers/x.py": "import time"},
        "what decides takes a Clock",
    ),
    "a decision that makes its own clock": (
        {"router/turns/x.py": "import fabric.hosting.clock", "fabric/hosting/clock.py": ""},
        "the machine's clock",
    ),
    "fabric runs MLX": (
        {"fabric/kvcache/x.py": "import mlx.core"},
        "fabric and placement have no I/O",
    ),
    "placement reads the clock": (
        {"router/placement/x.py": "import time"},
        "fabric and placement have no I/O",
    ),
    "OpenTelemetry elsewhere": (
        {"node/turn/x.py": "def f():\n    import opentelemetry.trace"},
        "OpenTelemetry enters",
    ),
    "OpenTelemetry where it may enter": (
        {"fabric/hosting/otel_spans.py": "import opentelemetry.sdk"},
        None,
    ),
    "Ray elsewhere": ({"router/app.py": "from ray import get"}, "Ray enters"),
    "MLX elsewhere in node": ({"node/store/pool.py": "import mlx.core"}, "MLX enters"),
    "MLX in the router": ({"router/turns/x.py": "import mlx_lm"}, "MLX enters"),
    "pickle": ({"node/turn/x.py": "import pickle"}, "nothing that runs code"),
    "marshal inside a function": (
        {"fabric/kvcache/x.py": "def f():\n    import marshal\n    return marshal"},
        "nothing that runs code",
    ),
    "a room of fabric that reaches up": (
        {"fabric/kvcache/x.py": "import fabric.control"},
        "fabric's rooms",
    ),
    "a room of node that reaches up": ({"node/store/x.py": "import node.engine"}, "node's rooms"),
    "prompt preparation that needs an agent": (
        {"node/prompt/x.py": "import node.agents"},
        "node's rooms",
    ),
    "a format that names its families": (
        {"node/dialect/formats.py": "import node.dialect.families"},
        "model families lie above",
    ),
    "a room of the router that reaches up": (
        {"router/placement/x.py": "import router.moves"},
        "router's rooms",
    ),
    "a dialect that imports its neighbour": (
        {"router/openai/x.py": "import router.admin"},
        "router's rooms",
    ),
    "a dialect's shapes elsewhere": (
        {"router/serve.py": "from router.openai import y", "router/openai/y.py": ""},
        "a dialect is known",
    ),
    "a policy that leaks out of placement": (
        {"router/fleet/x.py": "import router.placement.seconds"},
        "how placement decides",
    ),
    "a snapshot taken elsewhere": (
        {"router/turns/x.py": "import router.placement.snapshot"},
        "snapshots of the fleet",
    ),
    "a simulator that decides": (
        {"router/simulate/dispatcher.py": "import router.placement.snapshot"},
        ("snapshots of the fleet", "the simulator decides nothing"),
    ),
    "a simulator that reads the machine's clock": (
        {"router/simulate/run.py": "import time"},
        "what decides takes a Clock",
    ),
    "a router that stands on its simulator": (
        {"router/serve.py": "import router.simulate.timeline", "router/simulate/timeline.py": ""},
        ("router's rooms", "the product does not stand on its simulator"),
    ),
    "a part of the router on the command line": (
        {"router/cli/x.py": "import router.turns"},
        "the command line imports no serving part",
    ),
    "a part of a move that reaches up": (
        {"node/migration/incoming.py": "import node.migration.target"},
        "the parts of node.migration",
    ),
    "a module outside of all rooms": ({"node/stray.py": ""}, "node's rooms"),
    "two parts of a node that need each other": (
        {"node/tiers/a.py": "import node.tiers.b", "node/tiers/b.py": "import node.tiers.a"},
        "no circle",
    ),
    "a part that names the whole node": (
        {"node/tiers/x.py": "from node.node import Node"},
        "node's rooms",
    ),
    "two that need each other": (
        {
            "router/moves/a.py": "import router.moves.b",
            "router/moves/b.py": "import router.moves.a",
        },
        "no circle",
    ),
    "a scenario's reader imports its runs": (
        {"router/scenario/reader.py": "import router.scenario.run"},
        "router.scenario's modules",
    ),
    "product code imports tests": ({"node/turn/x.py": "import tests"}, "nothing imports tests"),
}


def rooms():
    """List the modules that contracts name: rooms, and parts that few may import."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in root["tool"]["importlinter"]["contracts"]:
        for package in contract.get("containers", ()):
            for layer in contract["layers"]:
                folder = package.replace(".", "/")
                yield from (f"{folder}/{name.strip()}" for name in layer.split("|"))
    for contract in root["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "protected":
            named = contract["protected_modules"] + contract["allowed_importers"]
            yield from (module.replace(".", "/") for module in named)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_import_rules_hold():
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_import_rule_reports_its_violation(name, tmp_path):
    files, found = CASES[name]
    broken = (found,) if isinstance(found, str) else found or ()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("fabric", "node", "router", "tests", "benchmarks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for room in rooms():
        if f"{room}.py" not in files:
            (tmp_path / room).mkdir(exist_ok=True)
            (tmp_path / room / "__init__.py").touch()
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    done = lint_imports(tmp_path)
    verdicts = [line for line in done.stdout.splitlines() if line.endswith(("KEPT", "BROKEN"))]
    rejected = [line for line in verdicts if line.endswith("BROKEN")]

    assert verdicts, done.stdout + done.stderr
    assert done.returncode == (1 if broken else 0), done.stdout
    assert [line for line in rejected if not line.startswith(broken or ("",))] == []
    assert len(rejected) == len(broken), done.stdout


@pytest.mark.parametrize("folder", ["fabric", "node", "router"])
def test_folder_repeats_bans_of_the_root(folder):
    """Ruff replaces the table of banned names when a folder has its own."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = tomllib.loads((ROOT / folder / "ruff.toml").read_text())
    everywhere = root["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    here = own["lint"]["flake8-tidy-imports"]["banned-api"]

    assert own["extend"] == "../pyproject.toml"
    assert everywhere.items() <= here.items()


def test_ruff_bans_modules_forbidden_in_fabric():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in root["tool"]["importlinter"]["contracts"]}
    own = tomllib.loads((ROOT / "fabric" / "ruff.toml").read_text())
    here = own["lint"]["flake8-tidy-imports"]["banned-api"]

    assert set(contracts["pure"]["forbidden_modules"]) <= here.keys()
