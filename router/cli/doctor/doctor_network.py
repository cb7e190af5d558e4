"""Checks of this machine's own network: routes, leases, firewall and sleep."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from fabric.net.interfaces import darwin_kind, parse_hardware_ports, parse_ifconfig
from fabric.net.links import LinkKind
from router.cli.doctor.finding import Check
from router.listener import IPV4_LOOPBACK, IPV6_LOOPBACK, bind_listeners


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
    """Read `socketfilterfw --getglobalstate`; return None if it reports no state."""
    state = re.search(r"State = (\d)", text)
    return None if state is None else state[1] != "0"


def sleep_minutes(text: str) -> int | None:
    """Return after how many idle minutes this Mac sleeps, from `pmset -g`; 0 is never."""
    match = re.search(r"^\s*sleep\s+(\d+)", text, re.MULTILINE)
    return None if match is None else int(match[1])


COMMAND_TIMEOUT_S: Final = 5.0
Run = Callable[..., str]
_PROC_ROUTE: Final = Path("/proc/net/route")


def run(*command: str) -> str:
    """Return a command's output, empty if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def network_checks() -> Iterator[Check]:
    """Yield the checks of this machine's network."""
    yield localhost_check()
    if sys.platform == "darwin":
        yield from darwin_checks(run)
    elif _PROC_ROUTE.exists():
        yield from linux_checks(_PROC_ROUTE.read_text())


def localhost_check() -> Check:
    """Check that clients reach a router here by either address of `localhost`."""
    try:
        for listener in bind_listeners(IPV4_LOOPBACK, 0):
            reached = listener.getsockname()[0]
            listener.close()
    except OSError as error:
        return Check("localhost", "error", f"{error.filename}: {error.strerror}")
    if reached == IPV6_LOOPBACK:
        return Check("localhost", "ok", f"{IPV4_LOOPBACK} and {IPV6_LOOPBACK}")
    detail = f"only {IPV4_LOOPBACK}: this machine has no {IPV6_LOOPBACK}"
    return Check("localhost", "ok", detail)


def linux_checks(proc_route: str) -> Iterator[Check]:
    """Yield the checks of Linux's routes."""
    device = default_device(parse_proc_route(proc_route))
    is_cable = device is not None and (device.startswith("thunderbolt") or device == "bridge0")
    yield _default_route(device, is_cable=is_cable)


def darwin_checks(run_command: Run) -> Iterator[Check]:
    """Yield the checks of a Mac, run by `run_command(program, *arguments)`."""
    ports = parse_hardware_ports(run_command("/usr/sbin/networksetup", "-listallhardwareports"))
    interfaces = parse_ifconfig(run_command("/sbin/ifconfig"), ports)
    routes = parse_netstat(run_command("/usr/sbin/netstat", "-rn", "-f", "inet"))
    device = default_device(routes)
    is_cable = device is not None and darwin_kind(device, ports) is LinkKind.THUNDERBOLT
    yield _default_route(device, is_cable=is_cable)
    cables = {i.device for i in interfaces if i.kind is LinkKind.THUNDERBOLT}
    local = {i.device for i in interfaces if i.host.startswith("169.254.")} & cables
    chosen = link_local_device(routes)
    if local and chosen is not None and chosen not in local:
        yield Check(
            "169.254 route",
            "warning",
            f"macOS sends all of 169.254 through {chosen}, not {', '.join(sorted(local))}: other "
            "programs, such as ping and Ray, do not find the Mac at the other end of the cable. "
            "macfabric's transfers name the interface; a static address helps them all",
        )
    for name in sorted(cables):
        lease = parse_dhcp_packet(run_command("/usr/sbin/ipconfig", "getpacket", name))
        if lease is not None:
            yield Check(
                "Thunderbolt DHCP",
                "warning",
                f"{name} has {lease[0]} by DHCP from {lease[1]}: the LAN reaches into the cable, "
                "and may go through it. Set the Thunderbolt Bridge to a static address",
            )
    if any(name == "bridge0" for name in ports) and not cables:
        yield Check("Thunderbolt", "ok", "no cable, or no address on the Thunderbolt Bridge")
    firewall = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    if firewall_is_on(run_command(firewall, "--getglobalstate")):
        yield Check(
            "firewall",
            "warning",
            "the firewall is on: allow incoming connections for the Python that runs the node, "
            "or peers cannot connect to this Mac",
        )
    yield _sleep(sleep_minutes(run_command("/usr/bin/pmset", "-g")))


def _default_route(device: str | None, *, is_cable: bool) -> Check:
    if is_cable:
        return Check(
            "default route",
            "warning",
            f"{device}, a Thunderbolt cable, carries everything that has no route of its own. In "
            "System Settings, Network, put it below Ethernet and Wi-Fi, or give it no router",
        )
    return Check("default route", "ok", device or "none")


def _sleep(minutes: int | None) -> Check:
    if minutes:
        detail = (
            f"this Mac sleeps after {minutes} minutes without work, and does not answer until it"
            " wakes; `sudo pmset -c sleep 0` keeps it awake on mains power"
        )
        return Check("sleep", "warning", detail)
    if minutes is None:
        return Check("sleep", "ok", "pmset reports no sleep setting")
    return Check("sleep", "ok", "this Mac stays awake")
