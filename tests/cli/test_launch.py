"""Programs and settings of `launch`, and its errors."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.launch import PROGRAMS, LaunchTarget
from tests.cli.fake_fabric import ANSWERS

ROOT = Path(__file__).parents[3]
PROGRAM = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
KEY = "a-tenants-own-key"


@pytest.fixture
def folder(tmp_path):
    """Return a folder of programs that say how they were started."""
    for client in PROGRAMS.values():
        path = tmp_path / (client.program or "anything")
        path.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
        path.chmod(0o755)
    return tmp_path


def launched(folder, fabric, *argv, **environment):
    """Run the command in a process of its own; return the program's arguments and environment."""
    command = [sys.executable, "-m", "router.cli.main", "launch", *argv[:1], "--url", fabric.url]
    done = subprocess.run(
        [*command, *argv[1:]],
        cwd=ROOT, env={**os.environ, "PATH": str(folder), **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_each_program_is_told_address_model_and_key(folder, fabric, name):
    fabric.key = KEY
    program = ["anything"] if name == "any" else []
    arguments, environment = launched(
        folder, fabric, name, "--", *program, "--its-own", MACFABRIC_API_KEY=KEY
    )

    told = json.dumps([arguments, environment])
    assert fabric.url in told
    assert "recall" in told
    assert KEY in environment.values()
    assert arguments[-1] == "--its-own"
    assert KEY not in arguments, "other accounts can read command lines"


def test_a_variable_that_would_win_is_taken_away(folder, fabric):
    _, environment = launched(folder, fabric, "claude", ANTHROPIC_API_KEY="of another service")

    assert environment["ANTHROPIC_BASE_URL"] == fabric.url
    assert environment["ANTHROPIC_AUTH_TOKEN"]
    assert "ANTHROPIC_API_KEY" not in environment


def test_printed_lines_do_in_a_shell_what_a_start_does(folder, fabric, run, monkeypatch):
    fabric.key = KEY
    monkeypatch.setenv("MACFABRIC_API_KEY", KEY)
    status, out, err = run("launch", "claude", "--print", "--url", fabric.url, "--key", KEY)
    assert (status, err) == (0, "")
    assert KEY not in out, "terminals keep what they show"

    shell = subprocess.run(
        ["/bin/sh", "-c", out], env={"PATH": str(folder), "MACFABRIC_API_KEY": KEY},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    arguments, environment = json.loads(shell.stdout)
    started = launched(folder, fabric, "claude", MACFABRIC_API_KEY=KEY)
    assert arguments == started[0]
    names = [name for name in started[1] if name.startswith(("ANTHROPIC", "CLAUDE"))]
    assert {name: environment.get(name) for name in names} == {n: started[1][n] for n in names}


def test_json_holds_command_and_environment(fabric, run):
    status, out, _ = run("launch", "codex", "--json", "--url", fabric.url)

    told = json.loads(out)
    assert status == 0
    assert told["command"][0] == "codex"
    assert told["model"] == "recall"
    assert f"{fabric.url}/v1" in shlex.join(told["command"])


def test_the_fabrics_authority_is_handed_on(tmp_path):
    for name, client in PROGRAMS.items():
        made = client.configure(_served(str(tmp_path / "ca.pem")))
        assert str(tmp_path / "ca.pem") in made.environment.values(), name
        assert None not in client.configure(_served(None)).environment.values()


def _served(authority):
    return LaunchTarget("https://fabric:8472", "recall", "key", authority)


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["claude"], 1, "claude is not installed here. Install it (npm install"),
        (["any"], 2, "name the program"),
        (["any", "--", "no-such-program"], 1, "no-such-program is not installed here. See"),
        (["codex", "--model", "gpt-5"], 2, "no node serves 'gpt-5'; there is: recall"),
        (["emacs"], 2, "invalid choice"),
    ],
)
def test_what_it_says_where_it_cannot(fabric, run, monkeypatch, tmp_path, argv, status, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    found, _, err = run("launch", *argv[:1], "--url", fabric.url, *argv[1:])

    assert found == status
    assert said in err


def test_of_several_models_one_is_to_be_named(fabric, run, monkeypatch):
    rows = [{"id": "recall"}, {"id": "recall-window"}]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/models"), {"object": "list", "data": rows})

    status, _, err = run("launch", "claude", "--print", "--url", fabric.url)
    assert (status, "choose a model with --model: recall, recall-window" in err) == (2, True)
    status, out, _ = run(
        "launch", "claude", "--print", "--url", fabric.url, "--model", "recall-window"
    )
    assert (status, "export ANTHROPIC_MODEL=recall-window" in out) == (0, True)
