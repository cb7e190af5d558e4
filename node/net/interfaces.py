"""This machine's network interfaces, and everything about them that differs by system."""

import fcntl
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

from fabric.net.interfaces import Interface, is_private_device, parse_hardware_ports, parse_ifconfig
from fabric.net.links import LinkKind

COMMAND_TIMEOUT_S: Final = 5.0
# A cable may be pulled at any time, but on macOS listing costs a process.
INTERFACES_LISTING_S: Final = 5.0
_SYSFS: Final = Path("/sys/class/net")
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_TUNNEL = re.compile(r"(?:tun|tap|wg|utun|ppp|ipsec|tailscale|zt)")


def list_interfaces() -> list[Interface]:
    """Return this machine's IPv4 addresses on interfaces that are up."""
    if sys.platform == "darwin":
        devices = tuple(name for _, name in socket.if_nameindex())
        ports = _hardware_ports(devices)
        if not ports:
            _hardware_ports.cache_clear()  # the command failed or timed out
        return parse_ifconfig(_output("/sbin/ifconfig"), ports)
    return list(_linux_interfaces())


class Listing:
    """The interfaces as last listed; thread-safe."""

    def __init__(
        self,
        list_now: Callable[[], list[Interface]] = list_interfaces,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_now = list_now
        self._now_s = now_s
        self._lock = Lock()
        self._listed_s = 0.0
        self._interfaces: tuple[Interface, ...] | None = None

    def current(self) -> tuple[Interface, ...]:
        """Return a listing at most `INTERFACES_LISTING_S` old; may run the system's commands."""
        with self._lock:
            if self._interfaces is None or self._now_s() - self._listed_s >= INTERFACES_LISTING_S:
                self._list()
            assert self._interfaces is not None, "just listed"
            return self._interfaces

    def latest(self) -> tuple[Interface, ...]:
        """Return the last listing whatever its age, without waiting for a command."""
        interfaces = self._interfaces
        return self.current() if interfaces is None else interfaces

    def refresh(self) -> tuple[Interface, ...]:
        with self._lock:
            self._list()
            assert self._interfaces is not None, "just listed"
            return self._interfaces

    def _list(self) -> None:
        listing = tuple(self._list_now())
        if (
            listing or self._interfaces is None
        ):  # an empty listing means that the system did not answer
            self._interfaces = listing
        self._listed_s = self._now_s()


MACHINE: Final = Listing()  # shared by all dials of this process


@lru_cache(maxsize=1)
def _hardware_ports(_devices: tuple[str, ...]) -> dict[str, str]:
    """Return the ports' names; slow on a Mac, so repeated only when the devices change."""
    return parse_hardware_ports(_output("/usr/sbin/networksetup", "-listallhardwareports"))


def _output(*command: str) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout


def _linux_interfaces() -> Iterator[Interface]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, device in socket.if_nameindex():
            request = struct.pack("256s", device.encode()[:15])
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
                host = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
                mask = fcntl.ioctl(sock, _SIOCGIFNETMASK, request)[20:24]
            except OSError:  # no IPv4 address, or gone
                continue
            flags = struct.unpack_from("<H", reply, 16)[0]
            is_up = flags & _IFF_UP and flags & _IFF_RUNNING
            if not is_up or is_private_device(device):
                continue
            kind = LinkKind.LOOPBACK if flags & _IFF_LOOPBACK else linux_kind(device)
            prefix_bits = int.from_bytes(mask, "big").bit_count()
            yield Interface(device, host, kind, linux_speed_mbit(device), prefix_bits)


def linux_kind(device: str, sysfs: Path = _SYSFS) -> LinkKind:
    """Return the kind of link by the interface's name and its folder in sysfs.

    `bridge0` is what a Mac calls its Thunderbolt bridge: emulated Macs do the same.
    """
    if device.startswith("thunderbolt") or device == "bridge0":
        return LinkKind.THUNDERBOLT
    folder = sysfs / device
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return LinkKind.WIFI
    if _TUNNEL.match(device) or _read(folder / "type") != "1":
        return LinkKind.OTHER
    return LinkKind.ETHERNET


def linux_speed_mbit(device: str, sysfs: Path = _SYSFS) -> int:
    """Return the driver's nominal speed, or 0 if it reports none."""
    text = _read(sysfs / device / "speed")
    return int(text) if text.isdecimal() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the driver refuses, or has no such attribute
        return ""
