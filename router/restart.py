"""Restart of the router's process with the installed code.

The process becomes the new program and keeps its id, its output and its listening sockets: clients
that connect meanwhile wait in their queues. Imports little, as `router/listener.py`.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

_ENVIRONMENT: Final = dict(os.environ)  # before libraries add to it
LISTENER_OPTION: Final = "--listener"  # descriptor of a listening socket, left by a restart


class RestartRequest:
    """Request for a restart of the router's process, which its main module performs."""

    def __init__(self) -> None:
        self.is_requested = False
        self._begin: Callable[[float], None] | None = None

    def bind(self, begin: Callable[[float], None]) -> None:
        """Set the action of a request, called with the seconds to wait for running turns."""
        self._begin = begin

    def ask(self, wait_s: float) -> None:
        """Begin the restart, only once."""
        assert self._begin is not None, "the router serves"
        if not self.is_requested:
            self.is_requested = True
            self._begin(wait_s)


def become_restarted(listeners: Sequence[socket.socket]) -> None:
    """Become a router with the installed code, in this process and with these sockets."""
    argv = [each for each in sys.orig_argv[1:] if not each.startswith(LISTENER_OPTION)]
    for listener in listeners:
        os.set_inheritable(listener.fileno(), True)
        argv.append(f"{LISTENER_OPTION}={listener.fileno()}")
    logging.getLogger("macfabric.router").info("restarting with the installed code")
    logging.shutdown()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *argv], _ENVIRONMENT)  # noqa: S606 - the same one
