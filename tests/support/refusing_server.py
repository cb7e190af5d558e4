"""A server in its own process that answers every request with 413 before reading the body."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tests.support.fabric_process import ROOT

HANG_S = 60.0
TEXT = b'{"error":{"code":"too_large"}}'


@dataclass(frozen=True, slots=True)
class Refusing:
    """Address of the server, and the folder of its certificates if it uses TLS."""

    address: tuple[str, int]
    keys: Path | None

    def connect(self, *, is_clear: bool = False) -> socket.socket:
        """Open a connection, over TLS unless `is_clear`."""
        sock = socket.create_connection(self.address, timeout=HANG_S)
        if self.keys is None or is_clear:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.keys / "ca.pem")
        return context.wrap_socket(sock, server_hostname=self.address[0])


@contextmanager
def refusing_server(name: str, keys: Path | None) -> Iterator[Refusing]:
    """Run the server of a `router` or `node` for a block of code."""
    argv = [sys.executable, "-m", "tests.support.refusing_server", name, str(keys or "")]
    child = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        host, port = json.loads(child.stdout.readline())
        yield Refusing((host, port), keys)
    finally:
        child.communicate(timeout=HANG_S)


async def refuse(scope, _receive, send) -> None:
    assert scope["type"] == "http"
    headers = [(b"content-length", str(len(TEXT)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": TEXT})


async def serve(name: str, keys: Path | None) -> None:
    """Serve until the input ends."""
    from fabric.settings import TlsSettings
    from node.http.routes import http_config as node_config
    from router.serve import http_config as router_config
    from router.tls.contexts import read_router_keys

    tls = read_router_keys(keys).client_facing(TlsSettings()) if keys is not None else None
    config = {"router": router_config, "node": node_config}[name](refuse, tls=tls)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    print(json.dumps(listener.getsockname()), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = server.force_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]) if sys.argv[2] else None))
