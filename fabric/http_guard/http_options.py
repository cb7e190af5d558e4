"""How a node and the router serve HTTP: the options of uvicorn that are the same for both."""

from typing import Any

from fabric.connection_limits import ACCEPTS_MAX, KEEP_ALIVE_S
from fabric.http_guard.connection_table import ConnectionTable, Places
from fabric.http_guard.guarded_connection import guarded
from fabric.http_guard.tls_gate import over_tls


def bounded_options(
    http_base: type[Any], tls_base: type[Any], places: Places | None, tls: Any
) -> dict[str, Any]:
    """Return the options of uvicorn's `Config` by which strangers are bounded.

    `http_base` is uvicorn's protocol for httptools, `tls_base` asyncio's SSLProtocol, `tls` a
    server's context, or None for clear text: fabric imports none of them.
    """
    table = ConnectionTable(places)
    http: Any = guarded(http_base, table)
    if tls is not None:
        http = over_tls(tls_base, http, table, tls)
    return {
        "http": http,
        "ws": "none",
        "lifespan": "off",
        "access_log": False,  # paths hold the names of agents
        "server_header": False,
        "backlog": ACCEPTS_MAX,  # for asyncio; the system's own is set once it listens
        "timeout_keep_alive": KEEP_ALIVE_S,
        "proxy_headers": False,  # whoever has one in front is no local peer, and shows a key
    }
