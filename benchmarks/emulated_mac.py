"""Emulated Macs with an ssh login and their own files, processes and hostname.

A Mac is pid 1 of namespaces inside its network namespace of an `EmulatedFleet`. Killing it kills
all its processes, as a pulled plug does; its home remains until the fleet ends. `ray stop` in it
sees only its own processes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks import emulated_fleet, namespaces
from benchmarks.emulated_fleet import EmulatedFleet, FleetError

ROOT = Path(__file__).resolve().parents[1]
BOOT = Path(__file__).with_name("mac_boot.py")
USER, USER_ID = "mac", 1501
HOME = f"/home/{USER}"
BOOT_TIMEOUT_S = 30.0
_POLL_S = 0.02
_PROGRAMS = ("/usr/sbin/sshd", "nsenter", "setpriv", "ssh-keygen", "rsync")
_LISTENS = "Server listening on 0.0.0.0"
_ETC = {
    "passwd": "{user}:x:{id}:{id}::/home/{user}:/bin/bash\n",
    "group": "{user}:x:{id}:\n",
    "shadow": "{user}:*:20000:0:99999:7:::\n",  # `!` would lock the account
}


def missing_requirement() -> str | None:
    """Return what this machine lacks for emulated Macs with ssh; None if they work."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt install openssh-server rsync)"
    return emulated_fleet.missing_requirement()


@dataclass(slots=True)
class EmulatedMac:
    """One Mac of a fleet; `name` is its hostname."""

    fleet: EmulatedFleet
    index: int
    name: str
    pid: int = 0  # of its first process, as seen by the host; 0: it is off
    _parent: subprocess.Popen[Any] | None = None
    _frozen: list[int] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Address on the Ethernet."""
        return self.fleet.ethernet_host(self.index)

    @property
    def home(self) -> Path:
        """Home of its user, as a path of the host."""
        return self._state / "home"

    @property
    def _state(self) -> Path:
        return namespaces.state_folder(self.fleet.number) / f"mac{self.index}"

    def start(self) -> Self:
        """Switch it on and wait until ssh logins work."""
        self.begin()
        self.wait_ready()
        return self

    def begin(self) -> None:
        """Switch it on."""
        if not self._state.exists():
            self._make_files()
        keep = [str(ROOT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]
        options = {"name": self.name, "user": USER, "state": str(self._state), "keep": keep}
        isolation = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        with (self._state / "sshd.log").open("w") as log:
            self._parent = self.fleet.exec(
                self.index,
                ["unshare", *isolation, sys.executable, "-P", "-I", str(BOOT), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            )

    def wait_ready(self) -> None:
        """Wait until its ssh server listens; raise FleetError with its log."""
        assert self._parent is not None
        log = self._state / "sshd.log"
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while _LISTENS not in (printed := log.read_text()):
            if self._parent.poll() is not None or time.monotonic() > deadline_s:
                message = f"{self.name} did not start: {printed.strip() or 'no output'}"
                raise FleetError(message)
            time.sleep(_POLL_S)
        number = self._parent.pid
        self.pid = int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])

    def exec(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a program in it as its user, in the project's folder."""
        around = {"HOME": HOME, "USER": USER, "LANG": "C.UTF-8", "TERM": "dumb"}
        path = f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin"
        variables = around | {"PATH": path, "PYTHONPATH": str(ROOT)} | dict(env or {})
        inside = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "-u", "-i"]
        person = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]
        clean = ["env", "-i", "-C", str(ROOT), *(f"{k}={v}" for k, v in variables.items())]
        return self.fleet.spawn([*inside, *person, *clean, *argv], **popen)

    def run(
        self, argv: Sequence[str], timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in it to its end; return its merged outputs."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = self.exec(argv, env, text=True, stdin=subprocess.DEVNULL, **streams)
        out, _ = child.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(list(argv), child.returncode, out)

    def kill(self) -> None:
        """Pull its plug: all its processes end at once; its home stays."""
        if self._parent is not None:
            self._parent.kill()  # the kernel then kills all its descendants
            self._parent.wait()
        self.pid, self._frozen = 0, []

    def freeze(self) -> None:
        """Stop all its processes, as on a Mac that sleeps or hangs."""
        while new := set(namespaces.pids(self.fleet.namespace(self.index))) - set(self._frozen):
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            self._frozen += new

    def thaw(self) -> None:
        """Resume it."""
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """Write a file into its home, owned by its user."""
        target = self.home / path
        for folder in reversed(target.relative_to(self.home).parents[:-1]):
            if not (self.home / folder).exists():
                (self.home / folder).mkdir(0o700)
                os.chown(self.home / folder, USER_ID, USER_ID)
        target.touch(mode)
        target.write_text(text)
        target.chmod(mode)
        os.chown(target, USER_ID, USER_ID)

    def _make_files(self) -> None:
        self.home.mkdir(parents=True)
        self.home.chmod(0o755)
        os.chown(self.home, USER_ID, USER_ID)
        etc = self._state / "etc"
        etc.mkdir()
        for name, line in _ETC.items():
            text = Path("/etc", name).read_text()
            (etc / name).write_text(text + line.format(user=USER, id=USER_ID))
            shutil.copymode(Path("/etc", name), etc / name)
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n"  # as Debian does
        (etc / "hosts").write_text(hosts)
        make_key(self._state / "host_key")


def make_key(path: Path) -> None:
    """Create a temporary ssh key pair without a passphrase."""
    namespaces.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fleet", "-f", str(path))


def start_macs(fleet: EmulatedFleet, names: Sequence[str]) -> list[EmulatedMac]:
    """Switch on the first Macs of a fleet; all of them trust the key in `state_folder`/key."""
    key = namespaces.state_folder(fleet.number) / "key"
    key.parent.mkdir(parents=True, exist_ok=True)
    if not key.exists():
        make_key(key)
    macs = [EmulatedMac(fleet, index, name) for index, name in enumerate(names)]
    for mac in macs:
        mac.begin()
        mac.write(".ssh/authorized_keys", key.with_suffix(".pub").read_text())
    for mac in macs:
        mac.wait_ready()
    return macs
