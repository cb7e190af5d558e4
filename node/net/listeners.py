"""Listening sockets of the data plane: one for all interfaces, and one per interface.

A connection must be answered through the interface by which it came, from the first packet on. The
system would answer by its routes: if two cables are in one network, always by the same one.
Connections inherit the interface of the listening socket, so each interface has a socket. On macOS
each address of an interface has one: of several sockets at one address and port, the system may
let one serve all, whatever they are bound to.
"""

import logging
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from fabric.net.interfaces import Interface
from fabric.net.links import LinkKind
from node.limits import LISTENERS_MAX
from node.net.addresses import bind_to_device

EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - chosen by name; only peers pass the handshake
_LOG = logging.getLogger(__name__)
_Place = tuple[str, str]  # device and address


class Listeners:
    """The sockets of one port, used by one thread."""

    def __init__(
        self, host: str, port: int, *, at_own_hosts: bool = sys.platform == "darwin"
    ) -> None:
        """Listen at `host` (an address of this machine, or EVERYWHERE).

        `at_own_hosts`: each interface's sockets at its own addresses instead of at all.
        """
        self._at_own_hosts = at_own_hosts
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._is_everywhere = host == EVERYWHERE
        self.main = socket.create_server(
            (host, port), family=family, reuse_port=self._is_everywhere
        )
        self.main.setblocking(False)
        self.host, self.port = self.main.getsockname()[:2]
        self._by_place: dict[_Place, socket.socket] = {}

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.main, *self._by_place.values()]

    def follow(self, interfaces: Sequence[Interface]) -> None:
        """Listen on these interfaces alone; if the system refuses, on all."""
        if not self._is_everywhere:
            return
        found = [
            (i.device, i.host if self._at_own_hosts else EVERYWHERE)
            for i in interfaces
            if i.kind is not LinkKind.LOOPBACK
        ]
        places = list(dict.fromkeys(found))[:LISTENERS_MAX]
        for place in [place for place in self._by_place if place not in places]:
            self._by_place.pop(place).close()
        for place in places:
            if place not in self._by_place:
                with suppress(OSError):  # not permitted, or gone
                    self._by_place[place] = self._listen(*place)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()

    def _listen(self, device: str, host: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bind_to_device(sock, device)
            sock.bind((host, self.port))
            sock.listen()
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock
