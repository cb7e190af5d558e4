"""Completion: the Tab key in real shells, and the requests of their scripts."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlencode

import pytest

from benchmarks.__main__ import list_benchmarks
from router.cli.commands import build_parser
from router.cli.completion import _COMPLETERS, SHELLS, _names
from router.scenario.source import shipped_names
from tests.cli.fake_fabric import AGENT, ANSWERS
from tests.cli.test_main import parsers
from tests.support.pseudo_terminal import LONGEST_S, TerminalProgram

ROOT = Path(__file__).resolve().parents[2]
AGENTS = [AGENT, {"id": "mira:2", "state": "owned"}, {"id": "new", "state": "owned"}]
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
READ = {
    "bash": "source {script}",
    "zsh": "autoload -U compinit; compinit -D -u; source {script}",
    "fish": "source {script}",
}
TABS = {"bash": "\t\t\t", "zsh": "\t\t", "fish": "\t"}  # until candidates are listed
# Line before the Tab key -> texts that the shell then shows.
TYPED = {
    "a command": ("macfabric undr", ["undrain"]),
    "verbs of a command": ("macfabric scenario s", ["show", "schema"]),
    "an option": ("macfabric nodes --st", ["--state"]),
    "an agent": ("macfabric agent ne", ["agent new"]),
    "agents": ("macfabric agent mi", ["mira:2"]),
    "nodes": ("macfabric migrate mira --to nod", ["node-a", "node-b", "node-c"]),
}
# Words after `macfabric` -> candidates.
ANSWERED = {
    "migr": ["migrate"],
    "scenario r": ["run", "runs"],
    "nodes --": ["--data", "--help", "--json", "--key", "--state", "--url", "--wide"],
    "agents --tier ": ["disk", "hot"],
    "agent m": ["mira", "mira:2"],
    "agents --why n": ["new"],
    "migrate mira --to=node-": ["--to=node-a", "--to=node-b", "--to=node-c"],
    "drain node-b": ["node-b"],
    "fork mira --as ": [],
    "completion ": sorted(SHELLS),
    "scenario cancel ": ["debate-1"],
    "launch claude --model r": ["recall"],
    "up --api-key-file keys --api": [],
    "agents --limit 3 --l": [],
    "up --allow-host a --allow": ["--allow-host"],
    "up --nodes ": [],
}


@pytest.fixture
def environment(fabric, monkeypatch, tmp_path):
    """Return the environment of a shell with `macfabric` and a fabric, in an empty folder."""
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents?limit=1000"), {"data": AGENTS})
    for prefix in ("m", "n", "mi", "ne", "mira"):
        after = f"{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}\x7f"
        page = [row for row in AGENTS if row["id"] > after]
        path = f"/v1/agents?{urlencode({'after': after, 'limit': 1000})}"
        monkeypatch.setitem(ANSWERS, ("GET", path), {"data": page})
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/scenarios"), {"data": [{"id": "debate-1"}]})
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    program = programs / "macfabric"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m router.cli.main "$@"\n')
    program.chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "TERM": "xterm",
        "MACFABRIC_URL": fabric.url,
        "MACFABRIC_DATA": str(tmp_path / "data"),
    }


def answers(environment, line):
    """Request candidates as the scripts do; return them without trailing spaces."""
    output = Path(environment["HOME"]).parent / "completions"
    output.unlink(missing_ok=True)
    request = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "fish",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
    }
    done = subprocess.run(
        ["macfabric"], env=environment | request, cwd=environment["HOME"], capture_output=True,
        text=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return sorted(text.strip() for text in output.read_text().splitlines())


@pytest.mark.parametrize("words", ANSWERED)
def test_completion_lists_possible_next_words(environment, words):
    assert answers(environment, f"macfabric {words}") == ANSWERED[words]


def test_shipped_names_and_files_are_completed(environment):
    (Path(environment["HOME"]) / "own.yaml").touch()

    assert set(answers(environment, "macfabric bench ")) == set(list_benchmarks())
    assert set(answers(environment, "macfabric scenario check ")) == {*shipped_names(), "own.yaml"}
    assert answers(environment, "macfabric config check ") == ["own.yaml"]
    assert answers(environment, "macfabric up --model ") == ["prose", "recall"]


def test_without_a_fabric_stored_nodes_are_completed(environment):
    gone = {name: value for name, value in environment.items() if name != "MACFABRIC_URL"}
    assert answers(gone, "macfabric agent ") == []
    assert answers(gone, "macfabric logs --node ") == []
    (Path(gone["MACFABRIC_DATA"]) / "nodes" / "node-q").mkdir(parents=True)

    assert answers(gone, "macfabric logs --node ") == ["node-q"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_unreachable_fabric_is_no_error(environment, url):
    assert answers(environment, f"macfabric agent --url {url} m") == []


def test_names_that_a_shell_could_run_are_left_out(environment, monkeypatch):
    rows = [{"name": name} for name in ("$(reboot)", "a b", "\x1b[2J", "`x`", "-x", None, "node-a")]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), {"data": rows})

    assert answers(environment, "macfabric drain ") == ["node-a"]


def test_fabric_that_does_not_answer_is_not_waited_for(environment, fabric):
    fabric.holds = True

    assert answers(environment, "macfabric agent m") == []


def test_slow_look_up_is_abandoned(fabric):
    release = threading.Event()

    def ask(_):
        release.wait(LONGEST_S)
        return [{"id": "late"}]

    assert _names(argparse.Namespace(url=fabric.url), ask, "id") == []
    release.set()


def test_refused_key_is_no_error(environment, fabric):
    fabric.key = "secret"

    assert answers(environment, "macfabric drain n") == []


def test_arguments_that_name_agents_and_nodes_are_completed():
    names = {"agent", "copy_on", "id", "node", "to", "why"}
    actions = [action for parser in parsers(build_parser()) for action in parser._actions]
    named = [a for a in actions if a.dest in names and not isinstance(a, argparse._HelpAction)]

    assert {action.dest for action in named} == names
    assert {action.metavar for action in named} <= set(_COMPLETERS)


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_printed_as_text_and_as_json(run, shell):
    status, out, err = run("completion", shell)

    assert (status, err) == (0, "")
    assert json.loads(run("completion", shell, "--json")[1])["script"].strip() == out.strip()


@pytest.fixture
def typist(shell, environment, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"script.{shell}"
    with script.open("w") as output:
        subprocess.run(["macfabric", "completion", shell], env=environment, stdout=output,
                       check=True)  # fmt: skip
    home = Path(environment["HOME"])
    with contextlib.closing(TerminalProgram(START[shell], environment, home)) as typist:
        typist.type(f"{READ[shell].format(script=script)}; echo read''y\n")
        assert typist.sees(["ready"]), typist.raw
        yield typist


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_key_completes(shell, typist):
    for name, (line, texts) in TYPED.items():
        typist.type(f"{line}{TABS[shell]}")
        assert typist.sees(texts), (name, typist.raw)
        typist.type("\x15")  # Ctrl-U: clear the line
