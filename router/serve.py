"""Runs the router: Ray for control, uvicorn for clients, until a signal ends it."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from fabric.cluster_secret import http_secret
from fabric.ids import NodeName
from fabric.settings import RouterSettings
from fabric.short_pauses import keep_pauses_short
from router import ray_control
from router.app import build_app
from router.clock import SystemClock
from router.fleet import Fleet
from router.listener import url_of
from router.membership import Roster
from router.node_link import ControlTransport, HttpNodeLink, open_session
from router.placement import Policy
from router.services import Services, assemble

_LOG = logging.getLogger("macfabric.router")

CONNECTIONS_MAX = 4096
KEEP_ALIVE_S = 75
STOP_GRACE_S = 10
READY_POLL_S = 0.05


def announce(url: str, nodes: list[str]) -> None:
    """Print the one line that says where the router listens."""
    print(json.dumps({"url": url, "nodes": nodes}), flush=True)  # noqa: T201 - its contract


async def serve(
    settings: RouterSettings,
    cluster_key: bytes,
    ray_address: str,
    listener: socket.socket,
    *,
    policy: Policy = Policy.SECONDS,
    on_ready: Callable[[str, list[str]], None] = announce,
) -> None:
    """Serve clients of the fabric at `ray_address` until SIGTERM or SIGINT."""
    ray_control.connect(ray_address)
    try:
        await serve_roster(
            settings,
            cluster_key,
            ray_control.ActorRoster(address=ray_address),
            listener,
            policy=policy,
            on_ready=on_ready,
        )
    finally:
        ray_control.disconnect()


async def serve_roster(
    settings: RouterSettings,
    cluster_key: bytes,
    roster: Roster,
    listener: socket.socket,
    *,
    policy: Policy = Policy.SECONDS,
    on_ready: Callable[[str, list[str]], None] = announce,
) -> None:
    """Serve clients of the nodes in `roster` on a socket that listens already."""
    async with open_session() as session:
        secret = http_secret(cluster_key)

        def link(
            name: NodeName, transport: ControlTransport, is_lost: Callable[[], bool]
        ) -> HttpNodeLink:
            return HttpNodeLink(name, transport, session, secret, is_lost)

        fleet = Fleet(roster, link, SystemClock(), policy)
        services = assemble(fleet, settings, cluster_key)
        server = _Server(
            uvicorn.Config(
                build_app(settings, services),
                lifespan="off",
                log_config=None,
                access_log=False,  # paths hold the names of agents
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_GRACE_S,
                # A proxy on this machine speaks for clients elsewhere: they are no local peers.
                forwarded_allow_ips="127.0.0.1,::1",
            )
        )
        _stop_on_signals(server)
        await _run(server, services, listener, on_ready)


async def _run(
    server: uvicorn.Server,
    services: Services,
    listener: socket.socket,
    on_ready: Callable[[str, list[str]], None],
) -> None:
    url = url_of(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    tending = asyncio.create_task(services.run())
    telling = asyncio.create_task(_tell_when_ready(services.fleet, url, on_ready))
    try:
        await asyncio.wait({serving, tending}, return_when=asyncio.FIRST_COMPLETED)
        if tending.done():
            server.should_exit = True
        await serving
        if tending.done():
            tending.result()  # raise what ended it
    finally:
        server.should_exit = True  # also when this was cancelled
        for task in (telling, tending):
            task.cancel()
        await asyncio.gather(serving, telling, tending, return_exceptions=True)


async def _tell_when_ready(
    fleet: Fleet, url: str, on_ready: Callable[[str, list[str]], None]
) -> None:
    # Readiness comes by beats, whose rhythm this follows.
    while not fleet.ready():  # noqa: ASYNC110
        await asyncio.sleep(READY_POLL_S)
    names = [view.name for view in fleet.ready()]
    keep_pauses_short()
    _LOG.info("serving at %s", url)
    on_ready(url, list(names))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: they end the whole router, not the server alone."""
        yield


def _stop_on_signals(server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        # Elsewhere than in the main thread, whoever started it stops it.
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, stop)
