"""Measure router and node CPU time per low-latency call, on new and on kept connections.

The router's link and the node's own server run in one process, over loopback; the answer has a
record's size and needs no work.
"""

import asyncio
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from starlette.applications import Starlette

from fabric.control.calls import CONTROL_PATH, NODE_HEADER, encode_call, encode_reply
from fabric.control.node_calls import Offer, SealAgent
from fabric.ids import AgentId, MigrationId, NodeName, TenantId
from fabric.keys import MEMBER_NAME, http_secret
from fabric.turn.generation import CLUSTER_HEADER
from node.http.routes import ControlHttp, http_server
from node.keys import read_keys
from router.cli.keys import KeyFolder
from router.fleet.node_http import NodeHttp, Use
from router.tls.authority import Subject
from router.tls.contexts import read_router_keys
from router.tls.machine_hosts import machine_hosts

CALLS, QUICK_CALLS, WARM_UP = 400, 20, 10
RECORD_BYTES = 35_000
_NAME = NodeName("node-a")
_SEAL = encode_call(
    SealAgent(TenantId("default"), AgentId("kim"), 3, MigrationId("m-1"), NodeName("node-b"))
)


def measure_calls(*, quick: bool) -> dict[str, dict[str, float]]:
    """Return milliseconds per call: CPU time of both ends, and median wall time."""
    count = QUICK_CALLS if quick else CALLS
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFolder.in_data(Path(folder))
        keys.create(Subject.of(machine_hosts()), datetime.now(UTC))
        for is_tls in (False, True):
            with _node(keys.path, is_tls=is_tls) as url:
                for use in (None, Use.CALL):
                    row = f"{'kept' if use else 'new'} connection, {'TLS' if is_tls else 'clear'}"
                    table[row] = asyncio.run(_calls(url, keys.path, use, count))
    return table


async def _calls(url: str, keys: Path, use: Use | None, count: int) -> dict[str, float]:
    router_keys = read_router_keys(keys)
    is_tls = url.startswith("https://")
    secret = http_secret(router_keys.cluster_key)
    headers = {"content-type": "application/msgpack", NODE_HEADER: _NAME, CLUSTER_HEADER: secret}
    name = MEMBER_NAME if is_tls else None
    waits_s = []
    async with NodeHttp(router_keys.node_facing() if is_tls else None) as http:
        for index in range(WARM_UP + count):
            if index == WARM_UP:
                used_s = time.process_time()
            began_s = time.perf_counter()
            answer = await http.post(url, CONTROL_PATH, _SEAL, headers, name, use)
            await answer.read()
            http.release(answer)
            waits_s.append(time.perf_counter() - began_s)
        used_s = time.process_time() - used_s
    median_s = statistics.median(waits_s[WARM_UP:])
    return {"CPU time [ms]": 1e3 * used_s / count, "median [ms]": 1e3 * median_s}


@contextmanager
def _node(keys: Path, *, is_tls: bool) -> Iterator[str]:
    """Serve calls as a node does, in a thread; yield its address."""
    node_keys = read_keys(keys)
    reply = encode_reply(Offer(bytes(RECORD_BYTES), b"", ()))

    async def answer(_: bytes) -> bytes:
        return reply

    app = Starlette(routes=ControlHttp(_NAME, node_keys.cluster_key, answer).routes())
    server = http_server(app, node_keys.server_context() if is_tls else None)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the node does
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        scheme = "https" if is_tls else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
