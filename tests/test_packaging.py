"""Packaging: names, pins, and contents of the tree."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fabric
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9][A-Za-z0-9.+!]*)")

# Brackets keep these patterns from matching their own line.
FORBIDDEN = {
    "an index address": re.compile(
        r"inde[x]-url|find-link[s]|pythonhoste[d]|pypi[.]or[g]/simple|registr[y]\s*=\s*.?http"
    ),
    "a path of somebody's machine": re.compile(
        r"(?<![\w.~}/-])/(?:root|work|farm|home/(?!you\b)\w+|Users/(?!you\b)\w+)/"
    ),
}


def files_of_the_tree() -> list[Path]:
    """List what git tracks or would add; without git (an unpacked archive), every file."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        hidden = re.compile(r"\.venv|\.git|\..*_cache|\.hypothesis|__pycache__|.*\.egg-info|build")
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(hidden.fullmatch(part) for part in path.relative_to(ROOT).parts)
        ]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(PIN.fullmatch(line).groups() for line in lines)


def closure(name: str, extras: set[str]) -> set[str]:
    """Name every distribution that `name[extras]` needs on this machine."""
    found: set[str] = set()
    todo = [(canonicalize_name(name), frozenset(extras))]
    seen = set(todo)
    while todo:
        current, wanted = todo.pop()
        found.add(current)
        for line in metadata.requires(current) or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in wanted | {""}):
                continue
            needed = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if needed not in seen:
                seen.add(needed)
                todo.append(needed)
    return found - {canonicalize_name(name)}


@pytest.mark.parametrize("name", ["fabric", "node", "router"])
def test_import_name_belongs_to_this_distribution(name):
    """Unrelated packages own these names on the public index and would replace ours silently."""
    owners = set(metadata.packages_distributions().get(name, ()))
    where = Path(__import__(name).__file__).resolve()

    assert owners == {fabric.DISTRIBUTION}
    assert where == ROOT / name / "__init__.py"


def test_distribution_metadata_matches_pyproject():
    installed = metadata.metadata(fabric.DISTRIBUTION)

    assert PYPROJECT["project"]["name"] == fabric.DISTRIBUTION == "macfabric"
    assert installed["Version"] == fabric.__version__
    assert set(installed["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert installed["License-Expression"] == "Apache-2.0"
    assert "Private :: Do Not Upload" in installed.get_all("Classifier")


def test_console_script_is_installed():
    scripts = metadata.entry_points(group="console_scripts", name="macfabric")

    assert {script.value for script in scripts} == {"router.cli.main:main"}
    assert Path(sys.executable).with_name("macfabric").is_file()


def names_of(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_every_import_is_a_declared_dependency():
    """A dependency of another package may disappear with its next version.

    Packages of an extra may be imported by a function, never by loading a module.
    """
    owners = metadata.packages_distributions()
    needed = names_of(PYPROJECT["project"]["dependencies"])
    extras = PYPROJECT["project"]["optional-dependencies"]
    optional = names_of([*extras["bench"], *extras["otel"]])
    undeclared = {}
    for path in (p for name in ("fabric", "node", "router") for p in (ROOT / name).rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree):
            declared = needed | optional if node in inner else needed
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {module.split(".")[0] for module in modules} - sys.stdlib_module_names:
                by = {canonicalize_name(owner) for owner in owners.get(top, ())}
                if not by & (declared | {fabric.DISTRIBUTION}):
                    undeclared[top] = path.relative_to(ROOT).as_posix()

    assert undeclared == {}


def test_constraints_are_names_and_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert lines == sorted(set(lines), key=lambda line: line.split("==")[0])
    assert len(pins()) == len(lines)


def test_constraints_pin_every_requirement():
    """On Linux and macOS alike; the macOS-only packages are checked by name."""
    needed = closure(fabric.DISTRIBUTION, {"dev"})

    assert needed - pins().keys() == set()
    assert pins()["mlx-metal"] == pins()["mlx-cpu"] == pins()["mlx"]


def test_installed_versions_match_the_pins():
    needed = closure(fabric.DISTRIBUTION, {"dev"}) & pins().keys()
    drifted = {n: metadata.version(n) for n in needed if metadata.version(n) != pins()[n]}

    assert drifted == {}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_tree_contains_no_forbidden_text(what):
    pattern = FORBIDDEN[what]
    found = []
    for path in files_of_the_tree():
        text = path.read_bytes().decode("utf-8", "replace")
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]

    assert found == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("an index address", "--inde" + "x-url https://packages.example/simple"),
        ("an index address", "url = https://files.pythonhoste" + "d.org/packages/x.whl"),
        ("a path of somebody's machine", 'open("/ro' + 'ot/notes.txt")'),
        ("a path of somebody's machine", "model: /Us" + "ers/anna/models/x"),
    ],
)
def test_forbidden_text_is_detected(what, text):
    assert FORBIDDEN[what].search(text)


def test_data_files_are_packaged():
    """`package-data` takes all of a package's folder except what the editor and tests need."""
    setuptools = PYPROJECT["tool"]["setuptools"]

    assert setuptools["package-data"] == {name: ["**/*"] for name in ("fabric", "node", "router")}
    assert "ruff.toml" in setuptools["exclude-package-data"]["*"]


def test_ci_script_is_executable_and_runs_the_readme_command():
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)


def collected(target):
    """Name the simulation's tests that a make target runs."""
    dry_run = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "-n",
            target,
            "TESTS=tests/sim/test_simulation.py",
            "ARGS=--collect-only -n 0",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    command = dry_run.stdout.splitlines()[-1].replace(".venv/bin/python", sys.executable)
    listed = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    return {line.partition("::")[2] for line in listed.stdout.splitlines() if "::" in line}


def test_make_targets_run_the_tests_that_the_readme_lists():
    """What is marked nightly runs in `make test-all`, beside all of `make test`."""
    readme = (ROOT / "README.md").read_text()
    some, every = collected("test"), collected("test-all")

    assert re.search(r"^make test +# .*minutes", readme, re.MULTILINE)
    assert re.search(r"^make test-all +# .*10,000 simulated lives.*hours", readme, re.MULTILINE)
    assert "test_seeds[0]" in some
    assert some < every
    assert {"test_many_more_seeds[10]", "test_many_more_seeds[9990]"} <= every - some


def test_files_listed_as_longest_exist():
    """A file that was renamed would begin last."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_licence_is_the_full_apache_text():
    text = (ROOT / "LICENSE").read_text()

    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
