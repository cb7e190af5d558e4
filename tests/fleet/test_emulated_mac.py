"""An emulated Mac has an ssh login, is isolated, and can lose its power."""

import secrets
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.emulated_fleet import EmulatedFleet
from benchmarks.emulated_mac import HOME, ROOT, missing_requirement, start_macs
from benchmarks.namespaces import state_folder

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(
        missing_requirement() is not None, reason=f"no emulated Macs: {missing_requirement()}"
    ),
]
SSH = ["ssh", "-i", f"{HOME}/.ssh/macfabric", "-o", "BatchMode=yes"]
SSH += ["-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]


@pytest.fixture(scope="module")
def macs():
    with EmulatedFleet(macs=2) as fleet:
        started = start_macs(fleet, ["studio", "mini"])
        started[0].write(".ssh/macfabric", (state_folder(fleet.number) / "key").read_text())
        yield started


def bash(mac, command):
    done = mac.run(["bash", "-c", command])
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_ssh_login_requires_the_key(macs):
    studio, mini = macs
    script = "hostname -s; whoami; echo $SSH_CONNECTION | cut -d' ' -f1,3"
    login = studio.run([*SSH, f"mac@{mini.host}", script])
    assert login.stdout.split() == ["mini", "mac", studio.host, mini.host]

    assert mini.run([*SSH, f"mac@{studio.host}", "true"]).returncode == 255  # it has no key
    assert studio.run([*SSH, f"root@{mini.host}", "true"]).returncode == 255


def test_mac_has_private_files_and_a_read_only_project(macs):
    studio, mini = macs
    for folder in ("/tmp", "/var/tmp", "/dev/shm", HOME):
        note = f"{folder}/note-{secrets.token_hex(8)}"  # the host has no file of that name
        bash(studio, f"echo mine > {note} && test -s {note}")
        bash(mini, f"test ! -e {note}")
        assert not Path(note).exists()
    assert mini.run(["touch", f"{ROOT}/note"]).returncode != 0
    assert mini.run(["touch", "/etc/note"]).returncode != 0
    bash(mini, f"cd {ROOT} && .venv/bin/python -c 'import node, sys; print(node.__file__)'")
    home = bash(mini, "ls -A /home")
    assert home.split() == ["mac"]


def test_power_loss_ends_all_processes_and_keeps_the_home_folder(macs):
    mini = macs[1]
    bash(mini, "echo kept > ~/kept; echo gone > /tmp/gone")
    sleeper = mini.exec(["sleep", "600"])
    mini.kill()
    assert sleeper.wait(10) != 0

    mini.start()
    assert bash(mini, "cat ~/kept; test ! -e /tmp/gone").split() == ["kept"]


def test_frozen_mac_is_silent_until_thawed(macs):
    mini = macs[1]
    ticking = mini.exec(
        ["sh", "-c", "while echo tick; do sleep 0.05; done"], stdout=subprocess.PIPE
    )
    ticking.stdout.readline()
    mini.freeze()
    deadline_s = time.monotonic() + 60
    while any(state(pid) not in "TZ" for pid in mini._frozen):  # a signal takes effect with a delay
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    states = {state(pid) for pid in mini._frozen}
    mini.thaw()
    assert "T" in states
    for _ in range(5):
        assert ticking.stdout.readline() == b"tick\n"
    ticking.kill()


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it had ended
        return "Z"


def test_ray_stop_affects_its_own_mac_only(macs, tmp_path):
    """`ray stop` ends every visible process called raylet: here, only its Mac's."""
    decoy = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep"), decoy)
    for mac in macs:
        mac.write("raylet", "")
        shutil.copy(decoy, mac.home / "raylet")
        (mac.home / "raylet").chmod(0o755)
    outside = subprocess.Popen([decoy, "600"])
    inside = [mac.exec([f"{HOME}/raylet", "600"]) for mac in macs]
    try:
        for mac in macs:
            bash(mac, "until [ $(pgrep -c -x raylet) = 1 ]; do sleep 0.1; done")
        # Each Mac sees its own raylet and neither of the others: only now is `ray stop` safe.
        stopped = macs[0].run([f"{ROOT}/.venv/bin/python", "-m", "ray.scripts.scripts", "stop"])
        assert stopped.returncode == 0, stopped.stdout
        assert inside[0].wait(60) != 0
        assert inside[1].poll() is None
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()
        for mac in macs:
            mac.kill()  # and its processes
            mac.start()
