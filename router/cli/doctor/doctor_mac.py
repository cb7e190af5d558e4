"""Checks of a Mac's own settings: backups, snapshots, power, limits and GPU.

Each reads the output of a macOS command; what cannot be read is left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Final

from fabric.hosting.process import OPEN_FILES
from fabric.limits import GIB, MIB
from router.cli.doctor.doctor_network import Run
from router.cli.doctor.finding import Check

# Other programs that compute on the GPU, by the last part of their path or a word of the command.
_GPU_PROGRAMS: Final = frozenset({
    "ollama", "llama-server", "lm studio", "mlx_lm", "mlx_vlm", "vllm", "omlx", "exo",
})  # fmt: skip
_LEFT_TO_SYSTEM_MIB: Final = 4 * GIB // MIB


def mac_checks(run_command: Run, folder: Path, memory_bytes: int) -> Iterator[Check]:
    """Yield a Mac's checks, run by `run_command(program, *arguments)`; `folder` holds the data."""
    checks = (
        _backups(run_command("/usr/bin/tmutil", "isexcluded", str(folder)), folder),
        _snapshots(run_command("/usr/bin/tmutil", "listlocalsnapshots", "/")),
        _open_files(run_command("/usr/sbin/sysctl", "-n", "kern.maxfilesperproc")),
        _low_power(run_command("/usr/bin/pmset", "-g")),
        _file_vault(run_command("/usr/bin/fdesetup", "status")),
        _rsync(run_command("/usr/bin/rsync", "--version")),
        _wired_limit(run_command("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"), memory_bytes),
        _gpu_programs(run_command("/bin/ps", "-axo", "pid=,command=")),
    )
    yield from (check for check in checks if check is not None)


def _backups(text: str, folder: Path) -> Check | None:
    if "[Included]" in text:
        detail = (
            f"Time Machine backs up {folder}: what is erased stays in its backups, and each day's "
            f"blocks are copied. `tmutil addexclusion {quote(str(folder))}` leaves it out"
        )
        return Check("backups", "warning", detail)
    return Check("backups", "ok", "Time Machine leaves the data out") if text else None


def _snapshots(text: str) -> Check | None:
    dates = re.findall(r"com\.apple\.TimeMachine\.([\d-]+)", text)
    if dates:
        detail = (
            f"{len(dates)} local snapshots hold what was erased since, for up to 24 hours, and the "
            f"disk space of it. `tmutil deletelocalsnapshots {dates[0]}` removes the oldest"
        )
        return Check("snapshots", "warning", detail)
    return Check("snapshots", "ok", "no local snapshot holds erased blocks") if text else None


def _open_files(text: str) -> Check | None:
    limit = _number(text)
    if limit is None:
        return None
    detail = f"one process may open {limit:,} files (kern.maxfilesperproc)"
    if limit >= OPEN_FILES:
        return Check("open files of a process", "ok", detail)
    remedy = f"{detail}, and all connections need {OPEN_FILES:,}"
    command = f"`sudo sysctl -w kern.maxfilesperproc={OPEN_FILES}` raises it"
    return Check("open files of a process", "warning", f"{remedy}; {command}")


def _low_power(text: str) -> Check | None:
    match = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", text, re.MULTILINE)
    if match is None:
        return None
    if match[1] == "1":
        detail = "low power mode slows this Mac down; `sudo pmset -a lowpowermode 0` ends it"
        return Check("low power mode", "warning", detail)
    return Check("low power mode", "ok", "off")


def _file_vault(text: str) -> Check | None:
    if "FileVault is On" in text:
        detail = (
            "on: after a power cut this Mac joins only when its password was typed in at its "
            "keyboard; `sudo fdesetup authrestart` is for planned restarts"
        )
        return Check("FileVault", "ok", detail)
    if "FileVault is Off" in text:
        detail = "off: anyone with the drive can read what node.encrypt_at_rest does not encrypt"
        return Check("FileVault", "ok", detail)
    return None


def _rsync(text: str) -> Check | None:
    if not text:
        return None
    flavour = "openrsync" if "openrsync" in text else text.splitlines()[0].strip()
    return Check("rsync", "ok", f"{flavour}; it has the options that `ray up` uses")


def _wired_limit(text: str, memory_bytes: int) -> Check | None:
    limit_mib = _number(text)
    if limit_mib is None:
        return None
    if limit_mib == 0:
        return Check("GPU memory", "ok", "macOS's own limit (iogpu.wired_limit_mb is 0)")
    left_mib = memory_bytes // MIB - limit_mib
    detail = f"iogpu.wired_limit_mb lets the GPU take {limit_mib:,} MiB, which leaves {left_mib:,}"
    if left_mib >= _LEFT_TO_SYSTEM_MIB:
        return Check("GPU memory", "ok", detail)
    remedy = "the system needs more; `sudo sysctl iogpu.wired_limit_mb=0` gives macOS's own limit"
    return Check("GPU memory", "warning", f"{detail}: {remedy}")


def _gpu_programs(text: str) -> Check | None:
    programs: dict[str, str] = {}
    for line in text.splitlines():
        pid, _, command = line.strip().lower().partition(" ")
        if "macfabric" in line:
            continue
        words = re.split(r"[\s/]+", command)
        for name in _GPU_PROGRAMS:
            if name in (command if " " in name else words):
                programs.setdefault(name, pid)
    if programs:
        named = ", ".join(f"{name} (process {pid})" for name, pid in sorted(programs.items()))
        detail = (
            f"{named} may use the GPU and its memory beside a node; end it where a node runs out "
            "of memory or this Mac restarts by itself"
        )
        return Check("other GPU programs", "warning", detail)
    return Check("other GPU programs", "ok", "none is known to run") if text else None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
