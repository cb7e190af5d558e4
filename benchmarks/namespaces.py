"""Network namespaces of emulated fleets: created, identified by owner, and removed.

A fleet has a number that is unique on the machine. Its file in STATE_DIR is locked while its owner
lives, so whether a fleet is in use does not depend on pids. Names look like `mf3-4711-m0`: fleet 3
of process 4711, its first Mac.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO, Any

STATE_DIR = Path("/run/macfabric-fleets")
FILES_DIR = Path("/var/lib/macfabric-fleets")
FLEETS_MAX = 64
COMMAND_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 10.0
CARRIER_TIMEOUT_S = 10.0
_NAME = re.compile(r"mf(\d+)-(\d+)-\w+")
_TRIAL = (
    "ip link add br0 type bridge && ip link add a0 type veth peer name b0 && "
    "tc qdisc add dev a0 root tbf rate 1mbit burst 32kb latency 50ms"
)


class FleetError(RuntimeError):
    """The machine cannot set up a part of an emulated fleet."""


@cache
def missing_requirement() -> str | None:
    """Return what this machine lacks for emulated fleets; None if they work."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt install iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", _TRIAL],  # noqa: S607 - found just above
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    if tried.returncode:
        return f"the kernel refuses namespaces, bridges or shaping: {tried.stderr.strip()}"
    return None


def run(*argv: str, check: bool = True) -> str:
    """Run a command and return its output; raise FleetError with its error output."""
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    if check and done.returncode:
        message = f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}"
        raise FleetError(message)
    return done.stdout


def ip_batch(lines: Iterable[str], namespace: str | None = None) -> None:
    """Run many `ip` commands in one process; the first that fails ends it."""
    inside = ["-n", namespace] if namespace else []
    done = subprocess.run(
        ["ip", *inside, "-batch", "-"],  # noqa: S607 - its path differs
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode:
        message = f"ip -batch: {done.stderr.strip()}"
        raise FleetError(message)


def subnet(number: int) -> IPv4Network:
    """Return a fleet's addresses: /24 number 0 is its Ethernet, the others are its cables."""
    return IPv4Network(f"10.{180 + number}.0.0/16")


def shape_device(namespace: str, device: str, rate_mbit: int | None) -> None:
    """Limit what `device` sends to `rate_mbit`; 0 or None lifts the limit."""
    if not rate_mbit:
        run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
        return
    # One millisecond of data: less cannot keep up with the timer, more lets a small transfer
    # exceed the link's rate.
    burst_bytes = max(64 * 1024, rate_mbit * 125)
    rate = ("rate", f"{rate_mbit}mbit", "burst", str(burst_bytes), "latency", "20ms")
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)


def await_carrier(namespace: str, device: str, *, up: bool) -> None:
    """Wait until a device has, or has lost, its carrier."""
    deadline_s = time.monotonic() + CARRIER_TIMEOUT_S
    while True:
        text = run("ip", "-n", namespace, "-j", "link", "show", "dev", device)
        if (json.loads(text)[0]["operstate"] == "UP") == up:
            return
        if time.monotonic() > deadline_s:
            message = f"{device} in {namespace} does not come {'up' if up else 'down'}"
            raise FleetError(message)
        time.sleep(0.02)


def claim() -> tuple[int, IO[str]]:
    """Take the first free fleet number; the returned file holds it until closed."""
    STATE_DIR.mkdir(mode=0o755, exist_ok=True)
    routes = _routed()
    for number in range(FLEETS_MAX):
        if any(subnet(number).overlaps(route) for route in routes):
            continue
        file = _lock(number)
        if file is None:
            continue
        remove(number)  # the leftovers of a dead owner
        return number, file
    message = f"all {FLEETS_MAX} fleet numbers of this machine are taken; try --sweep"
    raise FleetError(message)


def write_record(file: IO[str], record: dict[str, Any]) -> None:
    """Write the fleet's record into its lock file."""
    file.seek(0)
    file.truncate()
    json.dump(record, file)
    file.flush()


def records() -> dict[int, dict[str, Any]]:
    """Return the records of all fleets whose owner lives, by number."""
    live_records = {}
    for path in _state_files():
        number = int(path.stem)
        file = _lock(number, create=False)
        if file is not None:  # no process holds it
            file.close()
            continue
        with contextlib.suppress(OSError, ValueError):
            live_records[number] = json.loads(path.read_text())
    return live_records


def release(number: int, file: IO[str]) -> None:
    """Remove a fleet's namespaces, then release its number."""
    remove(number)
    with contextlib.suppress(FileNotFoundError):
        _path(number).unlink()
    file.close()


def sweep() -> list[int]:
    """Remove the fleets whose owners are dead; return their numbers."""
    numbers = {int(path.stem) for path in _state_files()} | {n for n, _ in _all_names()}
    swept = []
    for number in sorted(numbers):
        file = _lock(number)
        if file is not None:
            release(number, file)
            swept.append(number)
    return swept


def state_folder(number: int) -> Path:
    """Return the folder of a fleet's Macs, which is removed with the fleet."""
    return FILES_DIR / str(number)


def laptop_device(number: int) -> str:
    """Return the device by which this machine itself is on a fleet's Ethernet."""
    return f"mf{number}-laptop"


def start_guard(number: int) -> subprocess.Popen[bytes]:
    """Start a process that removes the fleet after this process has ended."""
    argv = [sys.executable, "-P", str(Path(__file__).resolve()), str(number)]
    return subprocess.Popen(
        argv,
        start_new_session=True,  # Ctrl-C must not reach it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def guard(number: int) -> None:
    """Wait until the owner of a fleet has ended, then remove its leftovers."""
    try:
        file = _path(number).open("r+")
    except FileNotFoundError:
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    if _is_current(number, file):
        release(number, file)


def pids(namespace: str) -> list[int]:
    """List the processes in a namespace."""
    return [int(pid) for pid in run("ip", "netns", "pids", namespace, check=False).split()]


def remove(number: int) -> None:
    """Kill all processes in a fleet's namespaces, by pid, and delete the namespaces."""
    names = _names(number)
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while remaining := [pid for name in names for pid in pids(name)]:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            break  # a process blocked in the kernel; its namespace is removed when it ends
        time.sleep(0.05)
    run("ip", "link", "del", laptop_device(number), check=False)
    for name in names:
        run("ip", "netns", "del", name, check=False)
    shutil.rmtree(state_folder(number), ignore_errors=True)


def _path(number: int) -> Path:
    return STATE_DIR / f"{number}.json"


def _state_files() -> Iterator[Path]:
    return (path for path in STATE_DIR.glob("*.json") if path.stem.isdigit())


def _is_current(number: int, file: IO[str]) -> bool:
    """Return whether the open file is still the one of that name."""
    try:
        return os.path.samestat(_path(number).stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _lock(number: int, *, create: bool = True) -> IO[str] | None:
    """Lock a number's file; None while its owner lives."""
    STATE_DIR.mkdir(mode=0o755, exist_ok=True)
    try:
        file = _path(number).open("a+" if create else "r+")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if not _is_current(number, file):  # the last owner deleted it between the two calls
        file.close()
        return None
    return file


def _all_names() -> list[tuple[int, str]]:
    listed = (line.split()[0] for line in run("ip", "netns", "list").splitlines() if line)
    return [(int(match[1]), name) for name in listed if (match := _NAME.fullmatch(name))]


def _names(number: int) -> list[str]:
    return [name for owner, name in _all_names() if owner == number]


def _routed() -> list[IPv4Network]:
    rows = json.loads(run("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    networks = []
    for row in rows:
        with contextlib.suppress(ValueError):  # "default", among others
            networks.append(IPv4Network(row["dst"]))
    return networks


if __name__ == "__main__":
    guard(int(sys.argv[1]))
