"""Addresses at which peers reach this machine, and sockets bound to the right interface.

A peer's address tells which cable leads to it; the system's routes do not. macOS sends all of
169.254 through its primary interface, and uses only one of two cables in the same network. So a
dialled socket is bound to the interface whose network contains the peer's address.
"""

import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from fabric.errors import RejectedError
from fabric.limits import ADDRESSES_MAX
from fabric.net.interfaces import Interface, interfaces_reaching
from fabric.net.links import LIKELY_ORDER, Address, LinkKind, scope_of
from node.limits import DEVICES_TRIED_MAX
from node.net.interfaces import MACHINE

_DEVICE_NAME_BYTES: Final = 16  # Linux
_IP_BOUND_IF: Final = 25  # macOS; Python has no name for it


def local_addresses(
    port: int, only: str | None = None, interfaces: Sequence[Interface] | None = None
) -> tuple[Address, ...]:
    """Return the addresses at which peers reach `port` on this machine, fastest link first.

    With `only`, just that host; else every address, and loopback if there is no other.
    """
    candidates = list(MACHINE.current() if interfaces is None else interfaces)
    if only is not None:
        candidates = [i for i in candidates if i.host == only] or [_unlisted_interface(only)]
    elif any(i.kind is not LinkKind.LOOPBACK for i in candidates):
        candidates = [i for i in candidates if i.kind is not LinkKind.LOOPBACK]
    candidates.sort(key=lambda i: (LIKELY_ORDER.index(i.kind), -i.speed_mbit))
    return tuple(
        Address(i.host, port, i.kind, i.speed_mbit, i.device, scope_of(i.host), i.prefix_bits)
        for i in candidates[:ADDRESSES_MAX]
    )


def _unlisted_interface(host: str) -> Interface:
    is_loopback = ip_address(host).is_loopback
    return Interface("", host, LinkKind.LOOPBACK if is_loopback else LinkKind.OTHER, 0, 0)


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connected socket and the interface it is bound to, if any."""

    sock: socket.socket
    interface: Interface | None


def connect(host: str, port: int, timeout_s: float, kind: LinkKind | None = None) -> socket.socket:
    """Connect as `dial` does, and return the socket alone."""
    return dial(host, port, timeout_s, kind).sock


def dial(host: str, port: int, timeout_s: float, kind: LinkKind | None = None) -> Dialled:
    """Connect to an address literal; names are refused, since resolving has no deadline.

    `kind` is the peer's kind of link at its address. If the network of an interface contains the
    address, the socket is bound to that interface; otherwise the system's routes decide.
    """
    try:
        target = ip_address(host)
    except ValueError:
        message = "a node's address is not an IP address"
        raise RejectedError(message, code="bad_address") from None
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    interfaces: list[Interface | None] = []
    if not target.is_loopback:
        interfaces = [*interfaces_reaching(host, kind, MACHINE.current())[:DEVICES_TRIED_MAX]]
    error = OSError("no route")
    for interface in interfaces or [None]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if interface is not None:
                bind_to(sock, interface)
            sock.settimeout(timeout_s)
            sock.connect((host, port))
        except OSError as failure:
            sock.close()
            error = failure
        else:
            return Dialled(sock, interface)
    raise error


def bind_to(sock: socket.socket, interface: Interface) -> None:
    """Bind `sock` to an interface for sending; raise OSError if it is gone.

    Linux may refuse the device to a plain user; the source address then picks the route.
    """
    try:
        bind_to_device(sock, interface.device)
    except PermissionError:
        sock.bind((interface.host, 0))


def is_on_cable(sock: socket.socket) -> bool:
    """Return whether all that a connected socket sends leaves by a Thunderbolt interface.

    Its address alone does not prove that: the system may send through another interface unless the
    socket is bound. So it is bound here, if it is not yet.
    """
    host = str(sock.getsockname()[0])
    for interface in MACHINE.latest():
        if interface.host == host and interface.kind is LinkKind.THUNDERBOLT:
            try:
                if not _is_bound_to(sock, interface.device):
                    bind_to_device(sock, interface.device)
            except OSError:  # Linux, as a plain user
                return False
            return True
    return False


def _is_bound_to(sock: socket.socket, device: str) -> bool:
    if sys.platform == "darwin":
        index: int = sock.getsockopt(socket.IPPROTO_IP, _IP_BOUND_IF)
        return index == socket.if_nametoindex(device)
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _DEVICE_NAME_BYTES)
    return raw.rstrip(b"\0") == device.encode()


def bind_to_device(sock: socket.socket, device: str) -> None:
    """Bind to an interface by name; raise OSError if it is gone or not permitted."""
    if sys.platform == "darwin":
        index = struct.pack("I", socket.if_nametoindex(device))
        sock.setsockopt(socket.IPPROTO_IP, _IP_BOUND_IF, index)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
