"""Parsers of what macOS and Linux print about routes, leases, firewall and sleep."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address


@dataclass(frozen=True, slots=True)
class Route:
    """Route of packets to one destination."""

    destination: str  # "default", or as the system prints it
    device: str


def parse_netstat(text: str) -> list[Route]:
    """List the IPv4 routes of `netstat -rn -f inet` on macOS, in its order."""
    routes, device_column = [], None
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Destination"]:
            device_column = words.index("Netif") if "Netif" in words else None
        elif device_column is not None and len(words) > device_column:
            routes.append(Route(words[0], words[device_column]))
    return routes


def parse_proc_route(text: str) -> list[Route]:
    """List the routes of Linux's /proc/net/route; addresses there are little-endian hex."""
    routes = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or not _is_hex(words[1], words[7]):
            continue
        host = IPv4Address(int.from_bytes(bytes.fromhex(words[1]), "little"))
        mask = int.from_bytes(bytes.fromhex(words[7]), "little")
        is_default = int(host) == 0 and mask == 0
        destination = "default" if is_default else f"{host}/{mask.bit_count()}"
        routes.append(Route(destination, words[0]))
    return routes


def _is_hex(*words: str) -> bool:
    return all(re.fullmatch(r"[0-9A-F]{8}", word) for word in words)


def default_device(routes: list[Route]) -> str | None:
    """Return the interface that everything without a route of its own takes."""
    return next((route.device for route in routes if route.destination == "default"), None)


def link_local_device(routes: list[Route]) -> str | None:
    """Return the interface that takes all of 169.254, if one does."""
    whole = {"169.254", "169.254/16", "169.254.0.0/16"}
    return next((route.device for route in routes if route.destination in whole), None)


def parse_dhcp_packet(text: str) -> tuple[str, str] | None:
    """Return the address and the server of a lease, from `ipconfig getpacket bridge0`."""
    address = re.search(r"^yiaddr = (\d+\.\d+\.\d+\.\d+)", text, re.MULTILINE)
    server = re.search(r"^server_identifier \(ip\): (\d+\.\d+\.\d+\.\d+)", text, re.MULTILINE)
    if address is None or address[1] == "0.0.0.0":  # noqa: S104 - compared, not bound
        return None
    return address[1], server[1] if server else "unknown"


def firewall_is_on(text: str) -> bool | None:
    """Read `socketfilterfw --getglobalstate`; return None if it says neither."""
    state = re.search(r"State = (\d)", text)
    return None if state is None else state[1] != "0"


def sleep_minutes(text: str) -> int | None:
    """Return after how many idle minutes this Mac sleeps, from `pmset -g`; 0 is never."""
    match = re.search(r"^\s*sleep\s+(\d+)", text, re.MULTILINE)
    return None if match is None else int(match[1])
