"""Listening sockets for clients; imports little, so that they open before the rest has loaded.

Clients that resolve `localhost` to ::1 connect there first, and some of them nowhere else. So a
router that serves this machine by IPv4 listens at both loopback addresses.
"""

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from fabric.errors import FatalError

BACKLOG: Final = 2048
IPV4_LOOPBACK: Final = "127.0.0.1"
IPV6_LOOPBACK: Final = "::1"
EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_SERVES_IPV4_LOOPBACK: Final = frozenset({IPV4_LOOPBACK, "localhost", "0.0.0.0"})  # noqa: S104
# Errors of a machine without IPv6, or without its loopback address.
_NO_IPV6: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_ANY_PRIVATE_ADDRESS: Final = "10.255.255.255"
_ADDED_WORDS: Final = " (while attempting to bind"  # what `create_server` adds to the reason
_PORT_TRIES: Final = 16  # of free ports, until one is free at both addresses


def listen(host: str, port: int) -> tuple[socket.socket, ...]:
    """Open the listening sockets; raise FatalError if one cannot be opened."""
    try:
        return bind_listeners(host, port)
    except OSError as error:
        message = f"cannot listen on {error.filename} port {port}: {error.strerror}"
        raise FatalError(message) from None


def inherited(descriptors: Sequence[int]) -> tuple[socket.socket, ...]:
    """Return the listening sockets that the process had before it became another program."""
    return tuple(socket.socket(fileno=descriptor) for descriptor in descriptors)


def bind_listeners(host: str, port: int) -> tuple[socket.socket, ...]:
    """Return listening sockets of one port; raise OSError with the address as its filename."""
    for left_count in reversed(range(_PORT_TRIES)):
        with ExitStack() as opened:
            first = opened.enter_context(_bind(host, port))
            listeners = [first]
            if host in _SERVES_IPV4_LOOPBACK and socket.has_ipv6:
                try:
                    second = _bind(IPV6_LOOPBACK, first.getsockname()[1])
                except OSError as error:
                    if error.errno not in _NO_IPV6:
                        if port or not left_count:
                            raise
                        continue
                else:
                    listeners.append(opened.enter_context(second))
            opened.pop_all()
            return tuple(listeners)
    message = "the last try returns or raises"
    raise AssertionError(message)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(_ADDED_WORDS)[0]
        raise OSError(error.errno, why, host) from None
    # Accepted connections inherit this; asyncio does not set it for them.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def own_address() -> str:
    """Return this machine's address in its network; the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ANY_PRIVATE_ADDRESS, 9))  # sends nothing: the system picks a route
        except OSError:
            return IPV4_LOOPBACK
        return str(probe.getsockname()[0])


def urls_of(listeners: Sequence[socket.socket], scheme: str = "http") -> list[str]:
    """Return the URLs at which a client on this machine reaches the sockets."""
    return [_url_of(listener, scheme) for listener in listeners]


def _url_of(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    if host in EVERY_ADDRESS:
        host = IPV4_LOOPBACK
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
