"""Arguments: accepted, refused, and their exit status."""

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.commands import DECLARATIONS, build_parser
from router.cli.doctor import import_check

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    *("up", "down", "serve", "status", "nodes", "agents", "agent", "migrate", "pin", "erase"),
    *("hibernate", "resume", "fork", "replicate", "prefetch", "drain", "undrain", "ray"),
    *("router", "voter", "promote"),
    *("doctor", "fsck", "config", "certs", "demo", "bench", "launch", "events", "direct"),
    *("rebuild", "decay", "close", "evict", "share", "supersede", "scenario"),
    "simulate",
}
MISUSES = {
    "no command": [],
    "an unknown command": ["fly"],
    "migrate without a target": ["migrate", "mira"],
    "agent without a name": ["agent"],
    "no nodes": ["up", "--nodes", "0"],
    "too many nodes": ["up", "--nodes", "99"],
    "a port that is none": ["up", "--port", "70000"],
    "a port in words": ["up", "--port", "http"],
    "a config that is not there": ["up", "--config", "/nowhere.yaml"],
    "a model folder that is not there": ["up", "--model", "/nowhere/model"],
    "config without a verb": ["config"],
}


def choices() -> dict:
    actions = build_parser()._subparsers._group_actions
    return actions[0].choices


def test_all_commands_are_declared():
    assert set(choices()) == COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_each_command_exits_with_0(run, command):
    status, out, _ = run(command, "--help")

    assert status == 0
    assert command in out


def parsers(parser=None):
    parser = parser or build_parser()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_help_describes_command_and_every_argument(parser):
    assert parser.description
    named = [a.dest for a in parser._actions if not isinstance(a, argparse._SubParsersAction)
             and not a.help]  # fmt: skip
    assert named == []


def test_help_of_erase_states_that_it_is_final(run):
    assert "cannot be undone" in " ".join(run("erase", "--help")[1].split())


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["migrat"], "Did you mean migrate"),
        (["erease", "mira"], "Did you mean erase"),
        (["config", "chek"], "Did you mean check"),
        (["fly"], "See `macfabric --help`"),
    ],
)
def test_unknown_command_suggests_a_similar_one(run, argv, hint):
    status, out, err = run(*argv)

    assert (status, out) == (2, "")
    assert hint in err


@pytest.mark.parametrize("command", sorted(COMMANDS - {"config", "certs", "ray", "scenario"}))
def test_every_command_has_a_json_option(command):
    assert "--json" in choices()[command].format_help()


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_exits_with_2(run, name):
    status, out, err = run(*MISUSES[name])

    assert (status, out) == (2, "")
    assert err


def test_duplicate_local_node_names_are_misuse(run, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("metadata: {macfabric: {local_nodes: [node-b]}}")
    status, _, err = run("up", "--nodes", "2", "--config", str(config))

    assert status == 2
    assert "same name" in err


def test_invalid_setting_is_misuse(run, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("metadata: {macfabric: {node: {hot_bytes: 0}}}")
    status, _, err = run("up", "--config", str(config))

    assert status == 2
    assert "macfabric.node.hot_bytes: must be positive" in err


def test_uncreatable_data_folder_is_an_error(run, tmp_path):
    (tmp_path / "file").touch()
    status, _, err = run("up", "--data", str(tmp_path / "file"))

    assert status == 1
    assert "cannot hold a fabric's data" in err


def test_port_in_use_is_reported_at_once(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = run("up", "--data", str(tmp_path / "data"), "--port", port)

    assert status == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in err


def test_address_of_another_machine_is_reported(run, tmp_path):
    host = "203.0.113.7"  # for documentation: nobody has it
    status, _, err = run("up", "--data", str(tmp_path / "d"), "--host", host, "--port", "0")

    assert status == 1
    assert f"cannot listen on {host} port 0" in err
    assert "--host takes an address of this machine" in err
    assert "a free one" not in err


def test_optimized_python_is_refused():
    command = [sys.executable, "-O", "-m", "router.cli.main", "status"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "python -O" in done.stderr


def test_foreign_package_is_refused(run, monkeypatch, tmp_path):
    (tmp_path / "fabric").mkdir()
    (tmp_path / "fabric" / "__init__.py").touch()
    monkeypatch.setattr(import_check, "_ROOT", tmp_path)
    status, _, err = run("nodes")

    assert status == 1
    assert "virtual environment of its own" in err
    assert "router" in err


def test_each_command_is_declared_in_its_module():
    everything = _choices(build_parser())

    assert list(DECLARATIONS) == list(everything)
    for name, place in DECLARATIONS.items():
        alone = _choices(build_parser([name]))
        assert set(alone) == {each for each in DECLARATIONS if DECLARATIONS[each] == place}
        assert alone[name].format_help() == everything[name].format_help()


def _choices(parser):
    (commands,) = (each for each in parser._actions if isinstance(each.choices, dict))
    return commands.choices


def test_command_does_not_import_other_commands():
    code = (
        "import sys; from router.cli.commands import build_parser; build_parser(['bench']);"
        "print(sorted({'numpy', 'cryptography', 'router.scenario'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


def test_help_imports_no_heavy_package():
    code = (
        "import sys; from router.cli.commands import build_parser; build_parser();"
        "print(sorted({'ray', 'mlx', 'openai', 'rich', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
