"""Listening socket for clients; imports little, so that it opens before the rest has loaded."""

import socket

from fabric.errors import FatalError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket; raise FatalError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {error.strerror}"
        raise FatalError(message) from None
    # Accepted connections inherit this; asyncio does not set it for them.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
