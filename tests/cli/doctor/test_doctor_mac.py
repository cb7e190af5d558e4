"""The doctor's reading of macOS commands, from their recorded output."""

from pathlib import Path

import pytest

from fabric.limits import GIB
from router.cli.doctor.doctor_mac import mac_checks

FOLDER = Path("/srv/macfabric/data")
IN_ORDER = {
    "tmutil isexcluded": f"[Excluded]    {FOLDER}\n",
    "tmutil listlocalsnapshots": "Snapshots for disk /:\n",
    "sysctl kern.maxfilesperproc": "138240\n",
    "pmset -g": "Currently in use:\n lowpowermode         0\n sleep                0\n",
    "fdesetup status": "FileVault is On.\n",
    "rsync --version": "openrsync: protocol version 29\nrsync version 2.6.9 compatible\n",
    "sysctl iogpu.wired_limit_mb": "0\n",
    "ps": "    1 /sbin/launchd\n  501 /usr/libexec/logd\n  700 /Applications/exodus/bin/wallet\n",
}
SNAPSHOTS = """Snapshots for disk /:
com.apple.TimeMachine.2026-11-25-101500.local
com.apple.TimeMachine.2026-11-26-091500.local
"""
PROGRAMS = """  812 /Applications/LM Studio.app/Contents/MacOS/LM Studio
  901 /opt/homebrew/bin/ollama serve
  902 python -m macfabric mlx_lm
"""
TRAPS = {
    "tmutil isexcluded": (f"[Included]    {FOLDER}\n", "backups", f"tmutil addexclusion {FOLDER}"),
    "tmutil listlocalsnapshots": (
        SNAPSHOTS,
        "snapshots",
        "2 local snapshots",
    ),
    "sysctl kern.maxfilesperproc": ("6144\n", "open files of a process", "maxfilesperproc=10240"),
    "pmset -g": (" lowpowermode         1\n", "low power mode", "pmset -a lowpowermode 0"),
    "sysctl iogpu.wired_limit_mb": ("15000\n", "GPU memory", "iogpu.wired_limit_mb=0"),
    "ps": (
        PROGRAMS,
        "other GPU programs",
        "lm studio (process 812), ollama (process 901) may",
    ),
}


def checks_of(**prints):
    answers = {**IN_ORDER, **prints}

    def run(program, *arguments):
        name = program.rpartition("/")[2]
        of_last = f"{name} {arguments[-1]}" if arguments else name
        of_first = f"{name} {arguments[0]}" if arguments else name
        return answers.get(of_last, answers.get(of_first, answers.get(name, "")))

    return {check.name: check for check in mac_checks(run, FOLDER, 16 * GIB)}


def test_well_configured_mac_has_no_warnings():
    checks = checks_of()
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert len(checks) == len(IN_ORDER)
    assert "typed in at its keyboard" in checks["FileVault"].detail
    assert checks["rsync"].detail.startswith("openrsync;")


@pytest.mark.parametrize("command", TRAPS)
def test_misconfiguration_is_a_warning_with_its_remedy(command):
    text, name, remedy = TRAPS[command]
    checks = checks_of(**{command: text})
    assert [each for each, check in checks.items() if check.verdict == "warning"] == [name]
    assert remedy in checks[name].detail


@pytest.mark.parametrize("command", IN_ORDER)
def test_check_is_omitted_when_its_command_prints_nothing(command):
    assert len(checks_of(**{command: ""})) == len(IN_ORDER) - 1


def test_sufficient_gpu_limit_is_ok():
    checks = checks_of(**{"sysctl iogpu.wired_limit_mb": "12288\n"})
    assert checks["GPU memory"].verdict == "ok"
    assert "leaves 4,096" in checks["GPU memory"].detail
