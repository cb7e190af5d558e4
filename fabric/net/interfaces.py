"""Network interfaces, parsed from macOS's output, and which of them reach a peer.

IPv4 only: link-local IPv6 addresses carry a scope that means nothing to the other machine.
169.254 addresses are kept, because a Thunderbolt cable between two Macs often has no others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from fabric.net.links import LIKELY_ORDER, LinkKind

# Reach only containers, guests or phones of this machine, or carry no IPv4 between Macs.
_PRIVATE = re.compile(
    r"(?:docker|veth|virbr|br-|cni|flannel|podman|lxc|vmnet|vmenet|bridge1\d\d|awdl|llw|anpi|ap\d)"
)


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of one network interface that is up."""

    device: str
    host: str
    kind: LinkKind
    speed_mbit: int = 0
    prefix_bits: int = 32


def is_private_device(device: str) -> bool:
    """Return whether an interface connects only virtual machines and containers of this machine."""
    return _PRIVATE.match(device) is not None


def is_local(host: str, interfaces: Sequence[Interface]) -> bool:
    """Return whether packets for `host` never leave this machine."""
    return ip_address(host).is_loopback or any(i.host == host for i in interfaces)


def interfaces_reaching(
    host: str, kind: LinkKind | None, interfaces: Sequence[Interface]
) -> list[Interface]:
    """Return the interfaces whose network contains a peer's address, the right cable first.

    `kind` is the peer's kind of link. Where both cables are in one network, only the
    kinds tell which end belongs to which: a Thunderbolt address is dialled over Thunderbolt,
    any other one over Thunderbolt last. One per device; none for an address that is routed,
    or that is this machine's own.
    """
    if ip_address(host).version != 4 or is_local(host, interfaces):
        return []
    candidates = [i for i in interfaces if i.kind is not LinkKind.LOOPBACK and _holds(i, host)]

    def unlikeliness(interface: Interface) -> tuple[bool, int]:
        is_cable = interface.kind is LinkKind.THUNDERBOLT
        crosses = is_cable != (kind is LinkKind.THUNDERBOLT)
        return crosses and kind is not None, LIKELY_ORDER.index(interface.kind)

    by_device = {i.device: i for i in sorted(candidates, key=unlikeliness, reverse=True)}
    return sorted(by_device.values(), key=unlikeliness)


def _holds(interface: Interface, host: str) -> bool:
    if not 0 < interface.prefix_bits < 32:
        return False
    network = ip_network(f"{interface.host}/{interface.prefix_bits}", strict=False)
    return ip_address(host) in network


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Map device to port name from `networksetup -listallhardwareports`."""
    pairs = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port for port, device in pairs}


def parse_ifconfig(text: str, ports: Mapping[str, str]) -> list[Interface]:
    """List the addresses of active interfaces from `ifconfig`."""
    interfaces = []
    for section in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        lead = re.match(r"(\w+): flags=[0-9a-f]+<([A-Z0-9,_]*)>", section)
        if lead is None or is_private_device(lead[1]) or "status: inactive" in section:
            continue
        flags = lead[2].split(",")
        if "UP" not in flags or "RUNNING" not in flags:
            continue
        kind = LinkKind.LOOPBACK if "LOOPBACK" in flags else darwin_kind(lead[1], ports)
        speed_mbit = _media_mbit(section)
        inet = r"^\s+inet (\d+\.\d+\.\d+\.\d+)(?: --> \S+)?(?: netmask 0x([0-9a-f]{1,8}))?"
        interfaces += [
            Interface(lead[1], host, kind, speed_mbit, int(mask or "0", 16).bit_count())
            for host, mask in re.findall(inet, section, re.MULTILINE)
        ]
    return interfaces


def darwin_kind(device: str, ports: Mapping[str, str]) -> LinkKind:
    """Return the kind of link by the device and the port's name.

    `bridge0` is the Thunderbolt bridge, whose port name depends on the user's language; the name of
    an Ethernet adapter on Thunderbolt has both words.
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
