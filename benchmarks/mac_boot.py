"""First process of an emulated Mac: makes its own files, then becomes its ssh server.

It runs in fresh mount, pid, uts and ipc namespaces. The Mac may write its own home, /tmp and other
temporary folders; it sees everything else of the host read-only, except other homes. Started by
`benchmarks/emulated_mac.py` with one JSON argument.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

PRIVATE = {
    "/tmp": "1777",  # noqa: S108 - made private here
    "/var/tmp": "1777",  # noqa: S108 - likewise
    "/dev/shm": "1777",  # noqa: S108 - likewise
    "/root": "755",  # an interpreter may lie there, which the Mac's user must reach
    "/home": "755",
    "/run": "755",
}
SHM_BYTES = 1 << 30
SCRATCH = Path("/mnt")
VIRTUAL = {"proc", "sysfs", "devpts", "devtmpfs", "mqueue", "cgroup2", "cgroup"}
SSHD = "/usr/sbin/sshd"


def mount(*argv: str) -> None:
    """Run mount; its errors go to the log."""
    subprocess.run(["/usr/bin/mount", *argv], check=True)


def set_up(name: str, user: str, state: Path, keep: list[str]) -> None:
    """Mount private folders, and make the rest read-only."""
    mount("--make-rprivate", "/")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind not in VIRTUAL and options.split(",")[0] == "rw":
            mount("-o", "remount,bind,ro", point.replace("\\040", " "))
    mount("-t", "tmpfs", "tmpfs", str(SCRATCH))
    hidden = [path for path in keep if any(path.startswith(f"{p}/") for p in PRIVATE)]
    moved = {path: SCRATCH / str(i) for i, path in enumerate(hidden)}
    moved[f"/home/{user}"] = SCRATCH / "home"
    for path, aside in moved.items():
        aside.mkdir()
        mount("--bind", str(state / "home") if aside.name == "home" else path, str(aside))
    mount("-o", "remount,bind,rw", str(SCRATCH / "home"))
    for etc in sorted((state / "etc").iterdir()):
        mount("--bind", str(etc), f"/etc/{etc.name}")
    for path, mode in PRIVATE.items():
        mount("-t", "tmpfs", "-o", f"mode={mode},size={SHM_BYTES}", "tmpfs", path)
    for path, aside in moved.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        mount("--move", str(aside), path)
    subprocess.run(["/usr/bin/umount", str(SCRATCH)], check=True)
    subprocess.run(["/usr/bin/hostname", name], check=True)


def main(text: str) -> None:
    """Set up and become sshd, which logs when it listens."""
    os.umask(0o022)  # its caller may have a stricter mask
    arguments = json.loads(text)
    host_key = Path(arguments["state"], "host_key").read_bytes()
    set_up(arguments["name"], arguments["user"], Path(arguments["state"]), arguments["keep"])
    Path("/run/sshd").mkdir()
    key = Path("/run/host_key")
    key.touch(0o600)
    key.write_bytes(host_key)
    options = ("PidFile=none", "UsePAM=no", "PasswordAuthentication=no", "PermitRootLogin=no")
    given_options = [word for option in options for word in ("-o", option)]
    os.chdir("/")
    os.execv(SSHD, [SSHD, "-D", "-e", "-f", "/dev/null", "-h", str(key), *given_options])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1])
