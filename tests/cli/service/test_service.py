"""Unit files of launchd and systemd: written, verified, loaded and removed."""

import json
import os
import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.service.installed import ROLES, installed_units
from router.cli.service.unit_files import LAUNCHD, SYSTEMD

ARGUMENTS = {
    "up": ("--nodes", "2", "--model", "/models/a b 100%/$x"),
    "serve": ("--expect", "2"),
    "ray": ("--address", "192.168.1.10:6379"),
    "router": ("--standby",),
    "voter": ("--port", "8011"),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A temporary home, with stand-ins for the system's programs that record their calls."""
    folder = tmp_path / "home"
    folder.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    calls = tmp_path / "calls"
    calls.touch()
    for name in ("systemctl", "launchctl"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ ! -e {calls}.fail ]\n')
        program.chmod(0o755)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def calls(tmp_path):
    return lambda: (tmp_path / "calls").read_text().splitlines()


def unit_of(home: Path, kind: str, role: str) -> Path:
    folder = "Library/LaunchAgents" if kind == LAUNCHD else ".config/systemd/user"
    return home / folder / f"macfabric-{role}{'.plist' if kind == LAUNCHD else '.service'}"


@pytest.mark.parametrize("role", ROLES)
def test_launchd_unit_is_a_property_list_with_the_whole_command(home, run, role):
    argv = ("service", "install", role, "--kind", LAUNCHD, "--no-start")
    status, out, err = run(*argv, "--", *ARGUMENTS[role])
    assert (status, err) == (0, "")
    path = unit_of(home, LAUNCHD, role)
    job = plistlib.loads(path.read_bytes())
    program, *rest = job["ProgramArguments"]

    assert Path(program).name == "macfabric"
    assert rest == [*(["ray", "start"] if role == "ray" else [role]), *ARGUMENTS[role]]
    assert job["Label"] == f"macfabric-{role}"
    assert job["RunAtLoad"] is True
    assert ("KeepAlive" in job) is (role != "ray")
    assert job.get("AbandonProcessGroup", False) is (role == "ray")
    assert job["ExitTimeOut"] == 120
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"start it with: launchctl bootstrap gui/{os.getuid()} {path}" in out


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scope", ["user", "system"])
def test_systemd_accepts_unit(home, run, role, scope, tmp_path):
    options = ("--system", "--user", "root") if scope == "system" else ()
    argv = ("service", "show", role, "--kind", SYSTEMD, *options, "--json")
    status, out, _ = run(*argv, "--", *ARGUMENTS[role])
    assert status == 0
    unit = tmp_path / f"macfabric-{role}.service"
    unit.write_text(json.loads(out)["text"])
    command = ["systemd-analyze", f"--{scope}", "verify", "--man=no", str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, unit.name in done.stderr) == (0, False), done.stderr

    # The check must find an unknown key.
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert unit.name in done.stderr


def test_systemd_reads_arguments_as_they_were(home, run):
    status, out, _ = run("service", "show", "up", "--kind", SYSTEMD, "--", *ARGUMENTS["up"])
    assert status == 0
    [line] = [line for line in out.splitlines() if line.startswith("ExecStart=")]
    assert line.endswith('up --nodes 2 --model "/models/a b 100%%/$$x"')


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="plutil is macOS's")
@pytest.mark.parametrize("role", ROLES)
def test_macos_accepts_unit(home, run, role):
    run("service", "install", role, "--kind", LAUNCHD, "--no-start", "--", *ARGUMENTS[role])
    path = unit_of(home, LAUNCHD, role)
    done = subprocess.run(["plutil", "-lint", str(path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kind", "started", "stopped"),
    [
        (
            SYSTEMD,
            [
                "systemctl --user daemon-reload",
                "systemctl --user enable --now macfabric-up.service",
            ],
            "systemctl --user disable --now macfabric-up.service",
        ),
        (
            LAUNCHD,
            ["launchctl bootstrap gui/{uid} {path}"],
            "launchctl bootout gui/{uid}/macfabric-up",
        ),
    ],
)
def test_unit_is_loaded_and_ended_by_its_system(home, run, calls, kind, started, stopped):
    path = unit_of(home, kind, "up")
    spelled = {"uid": os.getuid(), "path": path}
    expected = [line.format(**spelled) for line in started]
    kept = ("--kind", kind)
    status, out, _ = run("service", "install", "up", *kept, "--json")
    assert (status, json.loads(out)["done"]) == (0, "installed")
    assert calls() == expected
    status, out, _ = run("service", "show", "--json")
    assert [(row["role"], row["kind"]) for row in json.loads(out)] == [("up", kind)]
    assert [unit.path for unit in installed_units()] == [path]

    status, out, _ = run("service", "uninstall", "up", *kept)
    assert (status, path.exists()) == (0, False)
    assert calls()[len(expected) :] == [stopped.format(**spelled)]
    status, out, _ = run("service", "uninstall", "up", *kept)
    assert (status, "not installed" in out) == (0, True)


def test_existing_units_are_replaced_on_request_only(home, run, calls):
    path = unit_of(home, SYSTEMD, "voter")
    install = ("service", "install", "voter", "--kind", SYSTEMD, "--no-start")
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/mine\n")
    for argv in (install, ("service", "uninstall", "voter", "--kind", SYSTEMD)):
        status, _, err = run(*argv)
        assert (status, path.read_text()) == (2, "[Service]\nExecStart=/bin/mine\n"), err
    assert run(*install, "--force")[0] == 0
    ours = path.read_text()
    assert run(*install)[0] == 0  # the same again
    status, _, err = run(*install, "--", "--port", "9000")
    assert (status, "other arguments" in err, path.read_text()) == (2, True, ours)
    status, out, err = run("service", "show", "voter", "--kind", SYSTEMD)
    assert (status, out.strip()) == (0, ours.strip())
    assert "is installed" in err
    assert calls() == []


def test_wrong_uses_are_refused_before_anything_is_written(home, run, calls):
    for argv, why in (
        (("up", "--", "--nodez", "2"), "not valid"),
        (("up", "--", "--api-key", "hunter2-hunter2"), "--api-key-file"),
        (("up", "--user", "root"), "--user needs --system"),
        (("voter", "--", "--port", "80\n80"), "not valid"),
        (("up", "--", "--model", "a\nb"), "control character"),
        (("nothing",), "choose from"),
        (("ray",), "not valid"),
    ):
        status, _, err = run("service", "install", *argv)
        assert (status, why in err) == (2, True), (argv, err)
    assert list(home.rglob("*")) == []
    assert calls() == []


def test_failed_start_is_reported_with_its_command(home, run, tmp_path):
    (tmp_path / "calls.fail").touch()
    status, _, err = run("service", "install", "up", "--kind", SYSTEMD)
    assert status == 1
    assert "`systemctl --user daemon-reload` failed" in err
    assert unit_of(home, SYSTEMD, "up").exists()
