"""Listening sockets of the data plane: one for all, and one per interface.

What comes in by an interface must be answered through it, from the first packet on. The system
would answer by its routes: where two cables are in one network, always by the same. Connections
inherit the interface of the socket that listened, so each interface has one.
"""

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from fabric.interfaces import Interface
from fabric.links import LinkKind
from node.addresses import bind_to_device

EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - asked for by name; strangers stop at the handshake
DEVICES_MAX: Final = 32
_LOG = logging.getLogger(__name__)


class Listeners:
    """The sockets of one port; used by one thread after it was made."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at `host` (an address of this machine, or EVERYWHERE)."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._is_everywhere = host == EVERYWHERE
        self.main = socket.create_server(
            (host, port), family=family, reuse_port=self._is_everywhere
        )
        self.main.setblocking(False)
        self.host, self.port = self.main.getsockname()[:2]
        self._by_device: dict[str, socket.socket] = {}

    @property
    def sockets(self) -> list[socket.socket]:
        """All that listen now."""
        return [self.main, *self._by_device.values()]

    def follow(self, interfaces: Sequence[Interface]) -> None:
        """Listen on these interfaces, and no more on others; where the system refuses, on all."""
        if not self._is_everywhere:
            return
        found = [i.device for i in interfaces if i.kind is not LinkKind.LOOPBACK]
        devices = list(dict.fromkeys(found))[:DEVICES_MAX]
        for device in [name for name in self._by_device if name not in devices]:
            self._by_device.pop(device).close()
        for device in devices:
            if device not in self._by_device:
                with suppress(OSError):  # not permitted, or just gone
                    self._by_device[device] = self._listen(device)

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            sock.close()

    def _listen(self, device: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bind_to_device(sock, device)
            sock.bind((EVERYWHERE, self.port))
            sock.listen()
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock
