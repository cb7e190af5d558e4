"""This machine's network addresses with the links behind them; all that differs by system.

IPv4 only: link-local IPv6 addresses carry a scope that means nothing to the other machine.
169.254 addresses are kept, because a Thunderbolt cable between two Macs often has no others.
"""

import fcntl
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from fabric.control import Address, LinkKind
from fabric.errors import RejectedError

COMMAND_TIMEOUT_S: Final = 5.0
_SYSFS: Final = Path("/sys/class/net")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_IP_BOUND_IF: Final = 25  # macOS; Python has no name for it

# Reach only containers, guests or phones of this machine, or carry no IPv4 between Macs.
_PRIVATE = re.compile(
    r"(?:docker|veth|virbr|br-|cni|flannel|podman|lxc|vmnet|vmenet|bridge1\d\d|awdl|llw|anpi|ap\d)"
)
_TUNNEL = re.compile(r"(?:tun|tap|wg|utun|ppp|ipsec|tailscale|zt)")
_ORDER: Final = (
    LinkKind.THUNDERBOLT,
    LinkKind.ETHERNET,
    LinkKind.WIFI,
    LinkKind.OTHER,
    LinkKind.LOOPBACK,
)


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of one network interface that is up."""

    device: str
    host: str
    kind: LinkKind
    speed_mbit: int = 0


def local_addresses(port: int, only: str | None = None) -> tuple[Address, ...]:
    """List where peers reach `port` on this machine, most promising link first.

    With `only`, just that host; else every address, loopback only where there is no other.
    """
    interfaces = list_interfaces()
    if only is not None:
        interfaces = [i for i in interfaces if i.host == only] or [_unlisted(only)]
    elif any(i.kind is not LinkKind.LOOPBACK for i in interfaces):
        interfaces = [i for i in interfaces if i.kind is not LinkKind.LOOPBACK]
    interfaces.sort(key=lambda i: (_ORDER.index(i.kind), -i.speed_mbit))
    return tuple(Address(i.host, port, i.kind, i.speed_mbit) for i in interfaces)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to an address literal; names are refused, since resolving has no deadline.

    macOS routes all of 169.254 to its primary interface, so a link-local peer is dialled
    from every interface that has a link-local address, Thunderbolt first.
    """
    try:
        target = ip_address(host)
    except ValueError:
        message = "a node's address is no IP address"
        raise RejectedError(message, code="bad_address") from None
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    devices: list[str | None] = [None]
    if sys.platform == "darwin" and target.version == 4 and target.is_link_local:
        devices = [*link_local_devices(list_interfaces()), None]
    error = OSError("no route")
    for device in devices:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if device is not None:
                bound = struct.pack("I", socket.if_nametoindex(device))
                sock.setsockopt(socket.IPPROTO_IP, _IP_BOUND_IF, bound)
            sock.settimeout(timeout_s)
            sock.connect((host, port))
        except OSError as failure:
            sock.close()
            error = failure
        else:
            return sock
    raise error


def link_local_devices(interfaces: Sequence[Interface]) -> list[str]:
    """Name the interfaces with a 169.254 address, Thunderbolt first."""
    found = [i for i in interfaces if ip_address(i.host).is_link_local]
    found.sort(key=lambda i: _ORDER.index(i.kind))
    return list(dict.fromkeys(i.device for i in found))


def list_interfaces() -> list[Interface]:
    """List this machine's IPv4 addresses on interfaces that are up."""
    if sys.platform == "darwin":
        ports = _output("/usr/sbin/networksetup", "-listallhardwareports")
        return parse_ifconfig(_output("/sbin/ifconfig"), parse_hardware_ports(ports))
    return list(_linux_interfaces())


def _unlisted(host: str) -> Interface:
    is_loopback = ip_address(host).is_loopback
    return Interface("", host, LinkKind.LOOPBACK if is_loopback else LinkKind.OTHER)


# --- Linux -----------------------------------------------------------------------------------


def _linux_interfaces() -> Iterator[Interface]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, device in socket.if_nameindex():
            request = struct.pack("256s", device.encode()[:15])
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
                host = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
            except OSError:  # no IPv4 address, or gone meanwhile
                continue
            flags = struct.unpack_from("<H", reply, 16)[0]
            is_up = flags & _IFF_UP and flags & _IFF_RUNNING
            if not is_up or _PRIVATE.match(device):
                continue
            kind = LinkKind.LOOPBACK if flags & _IFF_LOOPBACK else linux_kind(device)
            yield Interface(device, host, kind, linux_speed_mbit(device))


def linux_kind(device: str, sysfs: Path = _SYSFS) -> LinkKind:
    """Tell the kind of link from the interface's name and its folder in sysfs."""
    if device.startswith("thunderbolt"):
        return LinkKind.THUNDERBOLT
    folder = sysfs / device
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return LinkKind.WIFI
    if _TUNNEL.match(device) or _read(folder / "type") != "1":
        return LinkKind.OTHER
    return LinkKind.ETHERNET


def linux_speed_mbit(device: str, sysfs: Path = _SYSFS) -> int:
    """Return the driver's nominal speed; 0 where it names none."""
    text = _read(sysfs / device / "speed")
    return int(text) if text.isdecimal() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the driver refuses, or there is no such attribute
        return ""


# --- macOS -----------------------------------------------------------------------------------


def _output(*command: str) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Map device to port name from `networksetup -listallhardwareports`."""
    found = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port for port, device in found}


def parse_ifconfig(text: str, ports: dict[str, str]) -> list[Interface]:
    """List the addresses of active interfaces from `ifconfig`."""
    interfaces = []
    for section in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        lead = re.match(r"(\w+): flags=[0-9a-f]+<([A-Z0-9,_]*)>", section)
        if lead is None or _PRIVATE.match(lead[1]) or "status: inactive" in section:
            continue
        flags = lead[2].split(",")
        if "UP" not in flags or "RUNNING" not in flags:
            continue
        kind = LinkKind.LOOPBACK if "LOOPBACK" in flags else darwin_kind(lead[1], ports)
        speed_mbit = _media_mbit(section)
        hosts = re.findall(r"^\s+inet (\d+\.\d+\.\d+\.\d+)", section, re.MULTILINE)
        interfaces += [Interface(lead[1], host, kind, speed_mbit) for host in hosts]
    return interfaces


def darwin_kind(device: str, ports: dict[str, str]) -> LinkKind:
    """Tell the kind of link from the device and the port's name.

    `bridge0` is the Thunderbolt bridge under whatever name the user's language gives it; an
    Ethernet adapter that hangs on Thunderbolt has both words in its name.
    """
    port = ports.get(device, "")
    if re.search(r"Wi-?Fi|AirPort|WLAN", port):
        return LinkKind.WIFI
    if re.search(r"Ethernet|LAN\b", port):
        return LinkKind.ETHERNET
    if device == "bridge0" or port.startswith("Thunderbolt"):
        return LinkKind.THUNDERBOLT
    return LinkKind.OTHER


def _media_mbit(section: str) -> int:
    media = re.search(r"media: .*?\((\d+)(G?)base", section, re.IGNORECASE)
    if media is None:
        return 0
    return int(media[1]) * (1000 if media[2] else 1)
