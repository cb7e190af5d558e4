"""`make nightly`: every nightly test is in exactly one part, and `.ci/run` needs none of them."""

import subprocess
import sys
from pathlib import Path

from tests.nightly_parts import PREFIXES, REST, parts, select

ROOT = Path(__file__).resolve().parents[1]


def collected(*options):
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            *options,
            "tests/sim",
            "tests/fuzz",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in process.stdout.splitlines() if "::" in line]


def test_every_test_is_in_exactly_one_part():
    lives = ["sim/test_simulation.py"] * 12 + ["sim/test_two_routers.py"] * 5
    paths = [*lives, "sim/test_disk.py", "fuzz/a.py", "router/b.py"]
    chosen = {part: select(paths, part) for part in parts()}

    assert all(sum(column) == 1 for column in zip(*chosen.values(), strict=True))
    assert [sum(chosen[f"lives-{n}"]) for n in range(1, 6)] == [3, 3, 2, 2, 2]
    assert [sum(chosen[f"routers-{n}"]) for n in range(1, 6)] == [1] * 5
    assert chosen[REST][-1]


def test_pytest_runs_the_selected_part():
    lives, fuzz = (collected("-m", "nightly", "--part", part) for part in ("lives-2", "fuzz"))

    assert 150 < len(lives) < 250, "a fifth of the lives"
    assert all("tests/sim/test_simulation.py" in name for name in lives)
    assert fuzz
    assert all(name.startswith("tests/fuzz/") for name in fuzz)


def test_prefixes_name_files_that_exist():
    """A renamed file would silently move to another part."""
    assert [prefix for prefix in PREFIXES if not (ROOT / "tests" / prefix).exists()] == []


def test_documents_name_every_part():
    page = (ROOT / "docs" / "testing.md").read_text()

    assert [part for part in parts() if f"`{part.split('-')[0]}" not in page] == []
