"""Arguments: accepted, refused, and their exit status."""

import argparse
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.commands import COMMANDS as DECLARED
from router.cli.commands import ELSEWHERE, GROUPS, build_parser
from router.cli.doctor import import_check

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    *("up", "down", "serve", "status", "nodes", "agents", "agent", "migrate", "pin", "erase"),
    *("usage", "chat"),
    *("hibernate", "resume", "fork", "replicate", "prefetch", "drain", "undrain", "ray"),
    *("router", "voter", "promote"),
    *("doctor", "fsck", "config", "certs", "demo", "bench", "launch", "events", "logs", "direct"),
    *("completion", "top", "rebuild", "decay", "close", "evict", "share", "supersede", "scenario"),
    *("backup", "restore", "service", "simulate", "support-bundle", "uninstall", "upgrade"),
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


# Each command's changes: none lasting, some that its help explains how to undo, or final ones.
UNCHANGING = {
    *("status", "nodes", "agents", "agent", "top", "usage", "events", "logs", "completion"),
    *("demo", "bench", "simulate", "launch", "chat", "doctor", "config check", "config show"),
    *("service show", "scenario check", "scenario show", "scenario list", "scenario schema"),
    *("scenario runs", "up", "down", "serve", "ray start", "router", "voter"),
    *("backup", "support-bundle", "certs create", "scenario run", "upgrade"),
}
CHANGING = {
    *("migrate", "fork", "replicate", "prefetch", "pin", "decay", "close", "share", "evict"),
    *("supersede", "rebuild", "erase", "hibernate", "resume", "restore", "direct", "drain"),
    *("undrain", "scenario cancel", "certs rotate", "service install", "service uninstall"),
    *("uninstall", "promote", "fsck"),
}
FINAL = {"erase", "uninstall", "certs rotate"}


def leaves() -> dict[str, argparse.ArgumentParser]:
    found = {parser.prog.removeprefix("macfabric "): parser for parser in parsers()}
    return {name: parser for name, parser in found.items() if not parser._subparsers}


def test_each_command_is_classified():
    assert set(leaves()) == UNCHANGING | CHANGING


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_help_states_what_can_be_undone(name):
    assert "undo" in " ".join(leaves()[name].description.split())


@pytest.mark.parametrize("name", sorted(FINAL))
def test_help_of_final_command_warns(name):
    assert "cannot be undone" in " ".join(leaves()[name].description.split())


@pytest.mark.parametrize("name", sorted(leaves()))
def test_description_does_not_begin_with_exit_status(name):
    assert not leaves()[name].description.startswith("Exit status")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["migrat"], "Did you mean migrate"),
        (["erease", "mira"], "Did you mean erase"),
        (["config", "chek"], "Did you mean check"),
        (["fly"], "See `macfabric --help`"),
        (["pull", "qwen"], "docs/models.md"),
        (["run", "qwen"], "macfabric chat"),
        (["ps"], "macfabric nodes"),
        (["-v", "migrat"], "Did you mean migrate"),
    ],
)
def test_unknown_command_suggests_a_similar_one(run, argv, hint):
    status, out, err = run(*argv)

    assert (status, out) == (2, "")
    assert hint in err


def test_names_of_other_servers_commands_are_free():
    assert not set(ELSEWHERE) & set(DECLARED)
    named = {word for text in ELSEWHERE.values() for word in re.findall(r"macfabric (\w+)", text)}
    assert named <= set(DECLARED)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["nodes", "--jsn"], "unrecognized arguments: --jsn. Did you mean --json?"),
        (["config", "check", "file", "--jason=1"], "Did you mean --json?"),
        (["drain", "node-a", "node-b"], "unrecognized arguments: node-b\n"),
        (["--verson"], "Did you mean --version?"),
    ],
)
def test_unknown_option_suggests_a_similar_one_of_its_command(run, argv, hint):
    status, out, err = run(*argv)
    command = " ".join(word for word in argv[:2] if word in {"nodes", "config", "check", "drain"})

    assert (status, out) == (2, "")
    assert hint in err
    assert err.startswith(f"usage: macfabric {command}".rstrip())


@pytest.mark.parametrize(
    "command", sorted(COMMANDS - {"config", "certs", "ray", "scenario", "service"})
)
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
    host = "203.0.113.7"  # for documentation: no host has it
    status, _, err = run("up", "--data", str(tmp_path / "d"), "--host", host, "--port", "0")

    assert status == 1
    assert f"cannot listen on {host} port 0 ({os.strerror(errno.EADDRNOTAVAIL)}); " in err
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

    assert set(DECLARED) == set(everything)
    for name in DECLARED:
        alone = _choices(build_parser([name]))
        assert set(alone) == set(everything)
        assert alone[name].format_help() == everything[name].format_help()


@pytest.mark.parametrize("argv", [[], ["config"], ["scenario"], ["certs"], ["ray"]])
def test_missing_command_prints_the_help_as_misuse(run, argv):
    status, out, err = run(*argv)

    assert (status, out) == (2, "")
    assert err == run(*argv, "--help")[1]
    assert err.startswith(f"usage: {' '.join(['macfabric', *argv])} [-h]")
    assert ("check and measure" in err) == (not argv)


def test_help_lists_each_command_once_in_its_group(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed, group = {}, None
    for line in run("--help")[1].splitlines():
        if line.endswith(":"):
            group = line.removesuffix(":")
        elif line.startswith("  ") and group in GROUPS:
            listed[line.split()[0]] = group  # a wrapped summary would count as a command

    assert listed == {each.name: name for name, group in GROUPS.items() for each in group}


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


def test_help_imports_no_command():
    code = (
        "import sys; from router.cli.commands import build_parser; build_parser([]);"
        "print([name for name in sys.modules if name.startswith(('router.client', 'ray'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
