"""Mistakes in a cluster file that Ray accepts: Macs, ssh, mounts and commands."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from fabric.keys import SHIPPED_KEYS
from fabric.limits import NODES_MAX
from fabric.settings import is_host, is_loopback
from router.cli.doctor.finding import ConfigFinding, error, warning

PROVIDER_KEYS = {"type", "head_ip", "worker_ips"}
_COMMAND_LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
# Each list of start commands -> the command it needs, and the complaint without it.
_STARTS: Final = {
    "head_start_ray_commands": (
        re.compile(r"macfabric ray start\b.*--head\b.*--autoscaling-config=\S"),
        "never runs `macfabric ray start --head --autoscaling-config=~/ray_bootstrap_config.yaml`",
    ),
    "worker_start_ray_commands": (
        re.compile(r"macfabric ray start\b.*--address=\$\{?RAY_HEAD_IP\b"),
        "never runs `macfabric ray start --address=$RAY_HEAD_IP:6379`",
    ),
}
_IDLE_MINUTES_LEAST: Final = 1_440  # Ray may stop a Mac that is idle for longer
_ADDRESS_ATTEMPT: Final = re.compile(r"[\d.]*\d[\d.]*[a-z]?", re.ASCII)


def cluster_findings(cluster: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    """Yield mistakes outside our own section; paths start at `base`, where `ray up` runs."""
    yield from _provider(map_at(cluster, "provider"), cluster)
    yield from _access(cluster, base)
    yield from _commands(cluster)


def named_hosts(cluster: dict[str, Any]) -> list[tuple[str, object]]:
    """List the Macs of a file, each with the setting that names it."""
    provider = map_at(cluster, "provider")
    workers = provider.get("worker_ips")
    listed = workers if isinstance(workers, list) else []
    return [
        ("provider.head_ip", provider.get("head_ip")),
        *((_place(at), worker) for at, worker in enumerate(listed)),
    ]


def _place(at: int) -> str:
    return f"provider.worker_ips[{at}]"


def host_complaint(host: object) -> str | None:
    """Return the problem with a Mac's address in words, or None."""
    text = str(host)
    if not isinstance(host, str) or not text:
        return f"must be an address such as 192.168.1.11, not {host!r}"
    if "://" in text:
        return f"{text} has a scheme: write the address alone"
    if "@" in text:
        return f"{text} names an account: write it in auth.ssh_user"
    if re.fullmatch(r"[^:]+:\d+", text):
        return f"{text} has a port: write the address alone"
    if not is_host(text) or _is_mistyped(text):
        return f"{text} is not an address: four numbers of 0-255 such as 192.168.1.11"
    try:
        socket.getaddrinfo(text, None, socket.AF_INET)
    except (OSError, UnicodeError) as failure:
        why = getattr(failure, "strerror", None) or failure
        return f"{text} cannot be resolved from here ({why}): give its address instead"
    return None


def _is_mistyped(text: str) -> bool:
    """Return whether a text looks like an IPv4 address and is not one."""
    if _ADDRESS_ATTEMPT.fullmatch(text.lower()) is None:
        return False
    try:
        ip_address(text)
    except ValueError:
        return True
    return False


def _provider(provider: dict[str, Any], cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    if not cluster.get("cluster_name"):
        yield warning("cluster_name", "is missing: a second cluster would share the default name")
    if provider.get("type") != "local":
        yield error("provider.type", "must be local: Ray starts no machines for a fabric")
        return
    for key in sorted(set(provider) - PROVIDER_KEYS):
        yield error(f"provider.{key}", "is unknown, and Ray ignores it silently")
    yield from _hosts(cluster)
    workers = provider.get("worker_ips")
    if isinstance(workers, list):  # else Ray has reported it
        yield from _workers(provider.get("head_ip"), workers, cluster)
    minutes = cluster.get("idle_timeout_minutes")
    if isinstance(minutes, int | float) and minutes < _IDLE_MINUTES_LEAST:
        message = f"is {minutes}: Ray may stop a Mac that was idle for so long; 525600 is a year"
        yield warning("idle_timeout_minutes", message)


def _workers(head: object, workers: list[Any], cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    if 1 + len(workers) > NODES_MAX:
        macs = 1 + len(workers)
        message = f"lists {macs} Macs including the head: a fabric has at most {NODES_MAX}"
        yield error("provider.worker_ips", message)
    if head in workers:
        yield error(
            _place(workers.index(head)), f"names the head {head}, which is always a node: remove it"
        )
    for at, address in enumerate(workers):
        if address in workers[:at]:
            yield error(_place(at), f"names {address} twice: remove one")
    count = len(workers)
    for key in ("min_workers", "max_workers"):
        wanted = cluster.get(key, count)
        if isinstance(wanted, int) and wanted < count:
            left_out = f"leaves {count - wanted} of {count} workers out"
            yield error(key, f"is {wanted} and {left_out} silently")
        elif isinstance(wanted, int) and wanted > count:
            yield warning(key, f"is {wanted}, but there are only {count} workers")


def _hosts(cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    for where, host in named_hosts(cluster):
        if host is None and where == "provider.head_ip":
            continue  # Ray reports it
        if is_loopback(str(host)):
            yield error(where, f"names {host}, which resolves to itself on every Mac")
        elif str(host).endswith(".local"):
            message = f"names {host}; such a name may resolve to the Mac itself: use its address"
            yield warning(where, message)
        elif (complaint := host_complaint(host)) is not None:
            yield error(where, complaint)


def _access(cluster: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    auth = map_at(cluster, "auth")
    if not auth.get("ssh_user"):
        yield error("auth.ssh_user", "is missing: `ray up` fails later, with a KeyError")
    key = auth.get("ssh_private_key")
    if not key and map_at(cluster, "provider").get("worker_ips"):
        message = "is missing: the head, which starts the workers, has no key to them"
        yield error("auth.ssh_private_key", message)
    if key and not Path(str(key)).expanduser().exists():
        message = f"{key} does not exist on this machine, where `ray up` needs it"
        yield error("auth.ssh_private_key", message)
    for remote, local in map_at(cluster, "file_mounts").items():
        path = base / Path(str(local)).expanduser()
        if not path.exists():
            message = f"{local} does not exist, seen from {base}, where `ray up` would run"
            if remote == SHIPPED_KEYS:
                message = f"{local} does not exist: `macfabric certs create` makes it"
            yield error(f"file_mounts.{remote}", message)
        elif path.is_dir():
            yield from _contents(f"file_mounts.{remote}", path)


def _contents(where: str, folder: Path) -> Iterator[ConfigFinding]:
    """Yield files that Ray should not read: it reads every file, also excluded ones."""
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    closed = [path for path in files if not os.access(path, os.R_OK)]
    if closed:
        yield error(where, f"this account may not read {closed[0]}: `ray up` fails (`make clean`?)")
    compiled = sum(path.suffix == ".pyc" for path in files)
    if compiled:
        message = "compiled files, which Ray takes for changed code; `make clean` removes them"
        yield warning(where, f"{folder} holds {compiled} {message}")


def _commands(cluster: dict[str, Any]) -> Iterator[ConfigFinding]:
    for key in _COMMAND_LISTS:
        for index, command in enumerate(_strings(cluster.get(key))):
            complaint = _shell_complaint(command)
            if complaint:
                yield error(f"{key}[{index}]", f"is not valid shell: {complaint}")
    has_workers = bool(map_at(cluster, "provider").get("worker_ips"))
    for key, (needed, complaint) in _STARTS.items():
        if not has_workers and key.startswith("worker"):
            continue
        if not any(needed.search(command) for command in _strings(cluster.get(key))):
            yield error(key, complaint)


def _shell_complaint(command: str) -> str | None:
    bash = shutil.which("bash")
    if bash is None:
        return None
    done = subprocess.run(
        [bash, "-n", "-c", command], capture_output=True, text=True, check=False, timeout=10
    )
    return (done.stderr.strip().splitlines() or ["?"])[0] if done.returncode else None


def map_at(cluster: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the map at a key, or an empty one."""
    value = cluster.get(key)
    return value if isinstance(value, dict) else {}


def _strings(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
