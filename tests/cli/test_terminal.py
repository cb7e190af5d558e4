"""Terminal output: escaped, in one place, and never a traceback."""

import ast
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.cli import output
from router.cli.output import print_table
from router.cli.terminal import print_error, print_json, print_line
from tests.cli.fake_fabric import AGENT, ANSWERS

ROOT = Path(__file__).resolve().parents[2]
WRITER = "router/cli/terminal.py"
# Other processes than the command line, which write for programs or into their logs.
OTHER_PROCESSES = {
    "node/__main__.py",
    "node/fsck/run.py",
    "router/__main__.py",
    "router/serve.py",
    "router/simulate/__main__.py",
    "router/restart.py",
    "router/stop.py",
    "router/supervise/keeper.py",
    "router/voter.py",
}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
HOSTILE = "mira\x1b]0;owned\x07\u202e\nreal line"


def raw_writes(path: str, text: str) -> Iterator[str]:
    """Yield the places that could write to a terminal, outside the module that may."""
    if path == WRITER:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in {"print", "Console"}:
            yield f"{path}:{node.lineno}: {node.id}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "os.write":
            yield f"{path}:{node.lineno}: os.write"
        elif isinstance(node, ast.Attribute) and node.attr in STREAMS:
            if ast.unparse(node.value) == "sys":
                yield f"{path}:{node.lineno}: sys.{node.attr}"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            names = [alias.name for alias in node.names]
            streams = module == "sys" and STREAMS & set(names)
            if streams or any(name.split(".")[0] == "rich" for name in (module, *names)):
                yield f"{path}:{node.lineno}: imports {module} {names}"


BREACHES = [
    "print('x')",
    "def f(): print(error, file=sys.stderr)",
    "show = print",
    "import sys\nsys.stdout.write('x')",
    "import sys\nsys.stderr.flush()",
    "from sys import stdout",
    "from rich.console import Console",
    "import rich.table",
    "import os\nos.write(1, b'x')",
]


@pytest.mark.parametrize("breach", BREACHES)
def test_raw_write_is_found(breach):
    assert list(raw_writes("router/cli/queries.py", breach))


def test_only_one_module_writes_to_the_terminal():
    paths = [path.relative_to(ROOT).as_posix() for room in ("fabric", "node", "router")
             for path in (ROOT / room).rglob("*.py")]  # fmt: skip
    found = {path: list(raw_writes(path, (ROOT / path).read_text())) for path in paths}

    assert {path for path, writes in found.items() if writes} <= OTHER_PROCESSES
    assert list(raw_writes("x.py", (ROOT / WRITER).read_text())), "the writer itself writes"


@pytest.mark.parametrize("write", [print_line, print_error])
def test_control_characters_are_escaped(write, capsys):
    write(HOSTILE)
    out, err = capsys.readouterr()

    assert "\x1b" not in out + err
    assert "\\x1b]0;owned\\x07\\u202e" in out + err
    assert out.count("\n") <= 1, "one call of print_line is one line"


def test_json_output_keeps_its_meaning(capsys):
    print_json({"id": HOSTILE})
    out = capsys.readouterr().out

    assert json.loads(out) == {"id": HOSTILE}
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


@pytest.mark.parametrize("command", [["agents"], ["agent", "mira"], ["nodes"], ["status"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_hostile_names_are_escaped(run, fabric, monkeypatch, command, as_json):
    hostile = {**AGENT, "id": HOSTILE, "node": HOSTILE, "last_match": {"kind": HOSTILE}}
    listed = {"object": "list", "data": [{**hostile, "name": HOSTILE, "state": HOSTILE,
              "degraded": HOSTILE, "model": HOSTILE}]}  # fmt: skip
    for path in ("/v1/agents", "/v1/nodes"):
        monkeypatch.setitem(ANSWERS, ("GET", path), listed)
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents/mira"), hostile)
    status, out, _ = run(*command, "--url", fabric.url, *(["--json"] if as_json else []))

    assert status == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert "\nreal line" not in out


def test_narrow_terminal_never_truncates_ids(capsys, monkeypatch):
    monkeypatch.setattr(output, "output_is_terminal", lambda: True)
    monkeypatch.setattr(output, "terminal_columns", lambda: 30)
    agent = "an-agent-whose-id-is-longer-than-the-terminal"
    print_table("Agents", ("agent", "node", "tokens"), [(agent, "node-a", "2,048")])
    out, err = capsys.readouterr()

    assert agent in out
    assert "node-a" in out
    assert "2,048" not in out
    assert "tokens" in err, "omitted columns are named"


@pytest.fixture(autouse=True)
def default_sigint():
    """Let children react to Ctrl-C even if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def macfabric(*argv: str, **options: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "router.cli.main", *argv], cwd=ROOT, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
@pytest.mark.parametrize("argv", [["scenario", "list"], ["scenario", "schema"], ["--help"],
                                  ["doctor", "--json"], ["bench", "--help"]])  # fmt: skip
def test_full_disk_is_a_one_line_error(argv):
    with Path("/dev/full").open("w") as full:
        process = macfabric(*argv, stdout=full, stderr=subprocess.PIPE, text=True)
        err = process.communicate(timeout=120)[1]

    assert process.returncode == 1
    assert err.splitlines() == [
        "macfabric: cannot write to standard output: no space left on device; free some space"
    ]


def test_closed_pipe_is_silent():
    with macfabric("scenario", "schema", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (1, b"")


def test_closed_streams_are_no_error():
    command = f"exec '{sys.executable}' -m router.cli.main scenario list >&- 2>&-"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, timeout=60, check=False)

    assert done.returncode == 0


def test_ascii_terminal_gets_escapes(tmp_path):
    scenario = tmp_path / "naïve.yaml"
    scenario.write_text("name: x\n")
    parent, child = pty.openpty()
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for argv in (["scenario", "check", str(scenario)], ["scenario", "list"]):
        process = macfabric(*argv, stdout=child, stderr=child, env=environment)
        process.wait(timeout=60)
        shown = os.read(parent, 1 << 16)

        assert b"Traceback" not in shown
        assert shown.isascii()
        assert shown
    os.close(child)
    os.close(parent)


def test_ctrl_c_is_a_one_line_error(fabric):
    fabric.holds = True
    process = macfabric("nodes", "--url", fabric.url, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    while not fabric.requests and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]

    assert (process.returncode, err) == (130, "macfabric: interrupted\n")


def test_ctrl_c_ends_a_child_without_a_traceback(tmp_path):
    module = "import signal\nprint('loads', flush=True)\nsignal.pause()\n"
    (tmp_path / "imported.py").write_text(module)
    code = (
        "import pathlib, sys\n"
        "from router.cli.child import run_module\n"
        f"sys.exit(run_module('imported', [], pathlib.Path({str(tmp_path)!r})))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loads\n"
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
@pytest.mark.parametrize("argv", [["bench", "--list"], ["fsck"], ["simulate", "--list"]])
def test_full_disk_of_child_is_a_one_line_error(argv, tmp_path):
    (tmp_path / "nodes" / "node-a").mkdir(parents=True)
    data = ["--data", str(tmp_path)] if argv == ["fsck"] else []
    with Path("/dev/full").open("w") as full:
        process = macfabric(*argv, *data, stdout=full, stderr=subprocess.PIPE, text=True)
        err = process.communicate(timeout=120)[1]

    assert process.returncode == 1
    assert len(err.splitlines()) == 1
    assert "cannot write to standard output" in err


def test_ctrl_c_during_imports_is_a_one_line_error():
    """Send the signal while modules are imported."""
    code = (
        "import signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'router.cli.commands': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from router.cli.main import main\n"
        "sys.exit(main(['nodes']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip

    assert (done.returncode, done.stderr) == (130, "macfabric: interrupted\n")


READERS = [
    *("config check", "up --config", "serve --config", "certs create", "resume", "scenario check")
]


@pytest.mark.parametrize("command", READERS)
def test_unreadable_file_is_a_one_line_error(run, tmp_path, command):
    for path, why in ((tmp_path / "absent.yaml", "no such file"), (tmp_path, "is a directory")):
        status, out, err = run(*command.split(), str(path))

        assert status in {1, 2}
        assert out == ""
        assert err.count("\n") == 1
        assert why in err.lower()
        assert "Errno" not in err
        assert err.count(str(path)) == 1
