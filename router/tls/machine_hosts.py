"""Addresses and names under which clients may reach this machine, for its certificate."""

import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LOOPBACK_LAST = 17  # `macfabric up` gives each of at most 16 nodes an address of its own
_COMMAND_TIMEOUT_S = 5.0
_LINUX_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_IFCONFIG = re.compile(r"^\s+inet (\S+)", re.MULTILINE)


def machine_hosts() -> list[str]:
    """List loopback addresses, every interface's IPv4 address, and the machine's names."""
    hosts = {"localhost", "::1", *(f"127.0.0.{number}" for number in range(1, LOOPBACK_LAST + 1))}
    hosts.update(_interface_addresses())
    name = socket.gethostname().lower().rstrip(".")
    if _is_host_name(name):
        hosts |= {name, f"{name.partition('.')[0]}.local"}
    return sorted(hosts)


def _interface_addresses() -> Iterator[str]:
    if sys.platform == "darwin":
        listed = _IFCONFIG.findall(_ifconfig())
    else:
        try:
            listed = _LINUX_LOCAL.findall(Path("/proc/net/fib_trie").read_text())
        except OSError:
            listed = []
    for text in listed:
        try:
            yield str(ipaddress.ip_address(text))
        except ValueError:
            continue


def _ifconfig() -> str:
    try:
        done = subprocess.run(
            ["/sbin/ifconfig"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _is_host_name(name: str) -> bool:
    return re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name, re.ASCII) is not None
