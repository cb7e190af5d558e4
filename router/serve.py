"""Run the router until a signal ends it: Ray for control, uvicorn for clients."""

import asyncio
import contextlib
import json
import logging
import random
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import uvicorn
from starlette.datastructures import State
from starlette.types import ASGIApp

from fabric.errors import FatalError
from fabric.hosting.clock import SystemClock, elapsed_s
from fabric.hosting.connection_table import ConnectionSlots
from fabric.hosting.http_server import HttpServer, server_config
from fabric.hosting.process import keep_pauses_short
from fabric.ids import NodeName
from fabric.keys import MEMBER_NAME, http_secret
from fabric.settings import RouterSettings
from router.app import build_app
from router.fleet import ray_control
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.fleet import Fleet, NodeAccess
from router.fleet.membership import LinkFactory, Roster
from router.fleet.node_client import ControlTransport, NodeLink, NodeLostError
from router.fleet.node_http import CONNECT_TIMEOUT_S, NodeHttp
from router.fleet.node_roster import RosterStore
from router.fleet.term_keeper import TermKeeper
from router.fleet.terms import SOLE_ROUTER, RouterTerms
from router.fresh_ids import fresh_name
from router.http.forwarded import Forwarding
from router.http.standby_gate import Relay
from router.listener import EVERY_ADDRESS, own_address, urls_of
from router.placement.placement import Placement
from router.restart import RestartRequest
from router.runs.runs import Runs
from router.services import Services, assemble
from router.shadow.change_log import ChangeLog
from router.shadow.exchange import Follower
from router.stop import RouterStop
from router.tls.contexts import RouterKeys, certificate_ends_s
from router.turns.tenant_usage import UsageFile

_LOG = logging.getLogger("macfabric.router")

BACKLOG = 1_024  # connections that wait to be accepted
STOP_GRACE_S = 10
READY_POLL_S = 0.05


def announce(url: str, nodes: list[str]) -> None:
    """Print one line with the router's URL and nodes."""
    print(json.dumps({"url": url, "nodes": nodes}), flush=True)  # noqa: T201 - its contract


class StopSignals:
    """Handler of SIGTERM and SIGINT, which stop a server in order."""

    def __init__(self) -> None:
        self._on_signal: Callable[[], None] | None = None

    def call(self, on_signal: Callable[[], None]) -> None:
        """Call `on_signal` for every signal from now on."""
        self._on_signal = on_signal
        self.install()

    def install(self) -> None:
        """Install the handler, also after other code replaced it."""
        if self._on_signal is None:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Outside the main thread, the code that started the router stops it.
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self._on_signal)


async def serve(  # noqa: PLR0913 - all by name, from one place
    settings: RouterSettings,
    keys: RouterKeys,
    ray_address: str,
    listeners: Sequence[socket.socket],
    *,
    placement: Placement | None = None,
    on_ready: Callable[[str, list[str]], None] = announce,
    runs_dir: Path | None = None,
    stop_wait_s: Callable[[], float] | None = None,
    expected: ExpectedNodes | None = None,
    roster_store: RosterStore | None = None,
    usage: UsageFile | None = None,
    patience_s: float = 0.0,
    watch_key: str | None = None,
    restart: RestartRequest | None = None,
) -> None:
    """Serve clients of the fabric at `ray_address` until SIGTERM, SIGINT or a `restart`."""
    ray_control.connect(ray_address, wait_s=ray_control.JOIN_S)
    signals = StopSignals()
    try:
        await serve_roster(
            settings,
            keys.cluster_key,
            ray_control.ActorRoster(address=ray_address, on_joined=signals.install),
            listeners,
            keys=keys,
            placement=placement,
            on_ready=on_ready,
            signals=signals,
            runs_dir=runs_dir,
            stop_wait_s=stop_wait_s,
            expected=expected,
            roster_store=roster_store,
            usage=usage,
            patience_s=patience_s,
            watch_key=watch_key,
            restart=restart,
        )
    finally:
        ray_control.disconnect()


async def serve_roster(  # noqa: PLR0913 - all by name, from one place
    settings: RouterSettings,
    cluster_key: bytes,
    roster: Roster,
    listeners: Sequence[socket.socket],
    *,
    placement: Placement | None = None,
    on_ready: Callable[[str, list[str]], None] = announce,
    signals: StopSignals | None = None,
    keys: RouterKeys | None = None,
    runs_dir: Path | None = None,
    stop_wait_s: Callable[[], float] | None = None,
    expected: ExpectedNodes | None = None,
    roster_store: RosterStore | None = None,
    usage: UsageFile | None = None,
    patience_s: float = 0.0,
    watch_key: str | None = None,
    restart: RestartRequest | None = None,
) -> None:
    """Serve clients of the nodes in `roster` on listening sockets.

    With `settings.standby`, this router may be the active one or a standby; it does not request a
    term during the first `patience_s`. Without `keys`, connections to nodes and clients have no
    TLS; without `runs_dir`, no scenarios run.
    """
    tls = keys.client_facing(settings.tls) if keys and settings.uses_tls else None
    async with AsyncExitStack() as opened:
        http = await opened.enter_async_context(NodeHttp(keys.node_facing() if keys else None))
        secret = http_secret(cluster_key)
        proven_as = MEMBER_NAME if keys else None

        def link(
            name: NodeName, transport: ControlTransport, is_lost: Callable[[], bool]
        ) -> NodeLink:
            return NodeLink(
                name, transport, http, secret, is_lost, proven_as=proven_as, terms=terms
            )

        keeper = _term_keeper(settings, expected, patience_s) if settings.standby else None
        voters = {url: _voter_link(url, link) for url in settings.voters}
        terms = keeper or SOLE_ROUTER
        access = NodeAccess(roster, link, SystemClock(), terms=terms, voters=voters)
        services = assemble(access, settings, cluster_key, placement, expected, roster_store, usage)
        fleet = services.fleet
        if keys is not None and tls is not None:
            services.telemetry.note_certificate(certificate_ends_s(keys, settings.tls))
        relay = await opened.enter_async_context(_relay(settings, cluster_key, keys, keeper))
        app = build_app(settings, services, runs_dir, relay, watch_key, restart)
        runs: Runs = app.state.runs

        def end_streams() -> None:
            fleet.events.close()
            runs.stop()

        server = HttpServer(http_config(app, tls=tls), BACKLOG, end_streams)
        wait_s = stop_wait_s or _wait_as_set(settings)
        stop = _stop_of(server, services, app.state, keeper, wait_s, restart)
        (signals or StopSignals()).call(stop.on_signal)
        fleet.urls = urls_of(listeners, "http" if tls is None else "https")
        if keeper is not None:
            keeper.terms.url = _own_url(settings, fleet.urls[0])
        resuming = asyncio.create_task(_host_runs(runs, keeper, app.state.follower))
        try:
            await _run(server, services, listeners, fleet.urls, on_ready)
        finally:
            await stop.close()
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)
            await runs.close()


def _term_keeper(
    settings: RouterSettings, expected: ExpectedNodes | None, patience_s: float
) -> TermKeeper:
    """Return the keeper of this router's term; raise FatalError if the voters are unknown."""
    configured = expected or ExpectedNodes(settings.nodes_expected)
    nodes = len(configured.names) or configured.count
    if not nodes:
        message = (
            "router.standby needs the number of nodes, as most of them choose the active router: "
            "set router.nodes_expected, or start with --expect"
        )
        raise FatalError(message)
    name = f"{socket.gethostname()[:64]}-{fresh_name('')}"
    terms = RouterTerms(name, nodes + len(settings.voters))
    return TermKeeper(terms, elapsed_s, random.random, patience_s=patience_s)


def _voter_link(url: str, link: LinkFactory) -> NodeLink:
    """Return the link to a voter that is not a node."""

    async def unreachable(_: bytes) -> bytes:
        message = f"the voter at {url} is reachable only over HTTP"
        raise NodeLostError(message, NodeName(url))

    voter = link(NodeName(url), unreachable, lambda: False)
    voter.http_url = url
    return voter


def _own_url(settings: RouterSettings, first: str) -> str:
    """Return the URL at which other Macs reach this router, as far as the settings determine it."""
    if settings.host not in EVERY_ADDRESS:
        return first
    parts = urlsplit(first)
    return f"{parts.scheme}://{own_address()}:{parts.port}"


@asynccontextmanager
async def _relay(
    settings: RouterSettings,
    cluster_key: bytes,
    keys: RouterKeys | None,
    keeper: TermKeeper | None,
) -> AsyncIterator[Relay | None]:
    """Open the way to the active router, for a router that may be a standby."""
    if keeper is None:
        yield None
        return
    tls = keys.router_facing(settings.tls) if keys else None
    own_certificate = bool(settings.tls.certificate)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls or True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        yield Relay(
            lambda: keeper.is_active,
            lambda: keeper.active_url,
            session,
            Forwarding(cluster_key),
            None if tls is None or own_certificate else MEMBER_NAME,
        )


async def _host_runs(runs: Runs, keeper: TermKeeper | None, follower: Follower | None) -> None:
    """Resume unfinished runs; with a standby, whenever this router is the active one."""
    if keeper is None or follower is None:
        await runs.resume_all()
        return
    following = asyncio.create_task(follower.run())
    try:
        while True:
            await keeper.wait_for(active=True)
            resuming = asyncio.create_task(runs.resume_all())
            try:
                await keeper.wait_for(active=False)
            finally:
                resuming.cancel()
                await asyncio.gather(resuming, return_exceptions=True)
            await runs.leave()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _stop_of(
    server: uvicorn.Server,
    services: Services,
    state: State,
    keeper: TermKeeper | None,
    wait_s: Callable[[], float],
    restart: RestartRequest | None,
) -> RouterStop:
    """Return the stop of this router; before a restart, a standby takes over."""
    log: ChangeLog = state.log
    return RouterStop(
        server,
        services.turns.running,
        wait_s,
        _stop_beginning(state.runs, keeper),
        restart=restart,
        has_standby=lambda: keeper is not None and keeper.is_active and log.is_followed,
        is_replaced=lambda: keeper is not None and bool(keeper.active_url),
    )


def _stop_beginning(runs: Runs, keeper: TermKeeper | None) -> Callable[[], None]:
    """Return the action that begins a stop, after which another router takes new turns."""
    retiring: list[asyncio.Task[None]] = []

    def begin() -> None:
        runs.stop()
        if keeper is not None:
            retiring.append(asyncio.create_task(keeper.give_up()))

    return begin


def _wait_as_set(settings: RouterSettings) -> Callable[[], float]:
    return lambda: settings.stop_wait_s


def http_config(
    app: ASGIApp, slots: ConnectionSlots | None = None, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Return the configuration of the router's server."""
    return server_config(app, slots, tls, log_config=None, timeout_graceful_shutdown=STOP_GRACE_S)


async def _run(
    server: uvicorn.Server,
    services: Services,
    listeners: Sequence[socket.socket],
    urls: Sequence[str],
    on_ready: Callable[[str, list[str]], None],
) -> None:
    serving = asyncio.create_task(server.serve(sockets=list(listeners)))
    tending = asyncio.create_task(services.run())
    announcing = asyncio.create_task(_announce_when_ready(services.fleet, urls, on_ready))
    try:
        await asyncio.wait({serving, tending}, return_when=asyncio.FIRST_COMPLETED)
        if tending.done():
            server.should_exit = True
        await serving
        if tending.done():
            tending.result()  # raises its error
    finally:
        server.should_exit = True  # also if this was cancelled
        for task in (announcing, tending):
            task.cancel()
        await asyncio.gather(serving, announcing, tending, return_exceptions=True)


async def _announce_when_ready(
    fleet: Fleet, urls: Sequence[str], on_ready: Callable[[str, list[str]], None]
) -> None:
    # Nodes become ready by heartbeats, which set no event.
    while not fleet.ready():  # noqa: ASYNC110
        await asyncio.sleep(READY_POLL_S)
    names = [view.name for view in fleet.ready()]
    keep_pauses_short()
    _LOG.info("serving at %s", ", ".join(urls))
    on_ready(urls[0], list(names))
