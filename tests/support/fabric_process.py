"""A real fabric in its own process with its own CPU time and memory, and attackers of it.

Time limits apply to CPU time: other load on the machine makes wall time useless, and a request that
stalls others uses CPU time. Only hangs are detected by wall time, with a generous limit.
"""

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fabric.limits import MIB

ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB = "key-of-alice-0123456789", "key-of-bob-0123456789"
HANG_S = 60.0
SILENT_CPU_S_MAX = 1.0  # during a call of /healthz: half a second of two processors
# While a hostile request is answered. Two busy threads of one core count up to twice a quiet one's
# seconds; reading a body repeatedly takes tens of seconds.
REFUSED_CPU_S_MAX = 4.0
GROWTH_BYTES_MAX = 64 * MIB
FILES_WANTED = 20_000
CONTEXT_TOKENS = 2_000_000  # so large that no body is refused unread because of its length
# Memory that glibc retains is not counted as growth; macOS returns it to the system.
THRIFTY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def allow_files() -> int:
    """Raise this process's limit of open files as far as allowed; return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def used(pid: int) -> tuple[float, int]:
    """Return a process's seconds of processor time, and its bytes of memory."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.exists():
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            raise ProcessLookupError(pid) from None
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    columns = subprocess.run(
        ["ps", "-o", "rss=,time=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    if len(columns) != 2:
        raise ProcessLookupError(pid)
    seconds = 0.0
    for part in columns[1].split(":"):
        seconds = 60 * seconds + float(part)
    return seconds, int(columns[0]) * 1024


@dataclass
class Attacked:
    """The process under attack, and the results of other clients meanwhile."""

    pid: int
    address: tuple[str, int]
    node: tuple[str, int]
    log: Path | None = None
    turns: int = 0
    pulses: int = 0
    silent_cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    start_bytes: int = 0
    peak_bytes: int = 0
    # Held while the peak is read and written: otherwise a watcher could restore an old peak
    # after begin().
    peak_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def cpu_s(self) -> float:
        """CPU time that the fabric has used."""
        return used(self.pid)[0]

    @property
    def growth_bytes(self) -> int:
        """Growth of the fabric's memory since `begin`."""
        return self.peak_bytes - self.start_bytes

    def connect(self, data: bytes = b"", *, node: bool = False) -> socket.socket:
        """Open a connection and send data."""
        sock = socket.create_connection(self.node if node else self.address, timeout=HANG_S)
        with suppress(ConnectionError):  # the server may close after reading enough
            sock.sendall(data)
        return sock

    def send(self, *parts: bytes, node: bool = False) -> bytes:
        """Send as many parts as the server reads; return the beginning of its answer."""
        with self.connect(node=node) as sock:
            with suppress(ConnectionError):
                for part in parts:
                    sock.sendall(part)
            return first_of(sock)

    def watch_memory(self) -> None:
        """Update the memory peak."""
        with self.peak_lock:
            self.peak_bytes = max(self.peak_bytes, used(self.pid)[1])

    def begin(self) -> None:
        """Reset all observations."""
        self.failures.clear()
        self.turns = self.pulses = 0
        self.silent_cpu_s = 0.0
        with self.peak_lock:
            self.start_bytes = self.peak_bytes = used(self.pid)[1]

    def judge(self) -> None:
        """Fail if other clients were affected or memory grew."""
        end_s = time.monotonic() + HANG_S
        while not (self.turns > 1 and self.pulses > 1) and time.monotonic() < end_s:
            time.sleep(0.02)
        found = (self.failures[:5], self.silent_cpu_s, self.growth_bytes // MIB)
        assert not self.failures, found
        logged = self.log.read_text(errors="replace").splitlines() if self.log else []
        assert [line for line in logged if "unexpected" in line] == []
        assert min(self.turns, self.pulses) > 1, "no other client was served"
        assert self.silent_cpu_s <= SILENT_CPU_S_MAX, found
        assert self.growth_bytes <= GROWTH_BYTES_MAX, found


def first_of(sock: socket.socket) -> bytes:
    """Read until the server closes, the first answer is complete, or it begins to stream."""
    answer = b""
    try:
        while part := sock.recv(65536):
            answer += part
            head, ended, body = answer.partition(b"\r\n\r\n")
            size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if ended and len(body) >= int(size or 0):
                break
    except ConnectionError:
        pass
    except TimeoutError:
        if not answer:
            raise
    return answer


def status_of(answer: bytes) -> int | None:
    """Return an answer's status; None if the connection was closed without one."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Run a fabric of two tenants; one takes turns continuously, and /healthz is polled."""
    allow_files()
    log = folder / "fabric.log"
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fabric_process", str(folder)],
            cwd=ROOT,
            env=os.environ | THRIFTY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        fabric = Attacked(child.pid, address_of(ready["url"]), address_of(ready["node"]), log)
        for _ in range(3):
            turn(fabric)
        assert not fabric.failures, fabric.failures
        fabric.begin()
        memory = (fabric, Attacked.watch_memory, 0.01)
        with watched((fabric, turn, 0.2), (fabric, pulse, 0.05), memory):
            yield fabric
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(HANG_S)
        except subprocess.TimeoutExpired:
            child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@contextmanager
def watched(*looks: "tuple[Attacked, Callable[[Attacked], None], float]") -> Iterator[None]:
    """Repeat each function with its pause, each in a thread of its own."""
    done = threading.Event()
    watchers = [
        threading.Thread(target=_repeat, args=(fabric, done, work, rest_s))
        for fabric, work, rest_s in looks
    ]
    for each in watchers:
        each.start()
    try:
        yield
    finally:
        done.set()
        for each in watchers:
            each.join(HANG_S)


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _repeat(fabric: Attacked, done: threading.Event, work, rest_s: float) -> None:
    while not done.wait(rest_s):
        try:
            work(fabric)
        except ProcessLookupError:
            fabric.failures.append("the fabric is gone")
            return


def turn(fabric: Attacked) -> None:
    """Take one turn of alice on a connection of its own."""
    request = {
        "model": "recall",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "The vault code of Mira is otter."}],
    }
    headers = {"authorization": f"Bearer {ALICE}", "content-type": "application/json"}
    status, text = _ask(fabric, "POST", "/v1/chat/completions", headers, json.dumps(request))
    fabric.turns += 1
    if status != http.client.OK:
        fabric.failures.append(f"alice's turn: {status} {text}")


def pulse(fabric: Attacked) -> None:
    before_s = fabric.cpu_s
    status, text = _ask(fabric, "GET", "/healthz", {}, None)
    fabric.silent_cpu_s = max(fabric.silent_cpu_s, fabric.cpu_s - before_s)
    fabric.pulses += 1
    if status != http.client.OK:
        fabric.failures.append(f"/healthz: {status} {text}")


def _ask(fabric: Attacked, method: str, path: str, headers: dict[str, str], body: str | None):
    connection = http.client.HTTPConnection(*fabric.address, timeout=HANG_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()[:200]
    except (OSError, http.client.HTTPException) as error:
        return None, repr(error)
    finally:
        connection.close()


def main() -> None:
    """Run the fabric until standard input is closed."""
    from tests.support.claimed_context import claiming
    from tests.support.local_fabric import local_fabric

    allow_files()
    folder, keys = Path(sys.argv[1]), {"alice": ALICE, "bob": BOB}
    model = str(claiming(folder, CONTEXT_TOKENS))
    with local_fabric(folder, model, "only", api_keys=keys) as fabric:
        node = fabric.services["only"].node.resources.endpoint.url
        print(json.dumps({"url": fabric.url, "node": node}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
