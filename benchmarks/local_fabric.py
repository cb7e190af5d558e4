"""Real nodes behind a real router in this process, for benchmarks that access a node."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chat_client import ChatClient
from fabric.ids import AgentId, NodeName, TenantId
from fabric.settings import NodeSettings, RouterSettings
from node.agents.agent import Agent
from node.service import NodeConfig, NodeService
from router.fleet.node_client import ControlTransport
from router.placement.choice import Policy
from router.placement.placement import Placement
from router.serve import serve_roster

KEY = bytes(range(32))


class LocalFabric:
    """Nodes and their router, with HTTP clients."""

    def __init__(
        self,
        folder: Path,
        model: str,
        names: Sequence[str],
        settings: NodeSettings,
        router: RouterSettings,
        policy: Policy = Policy.SECONDS,
    ) -> None:
        self._folder = folder
        self._model = model
        self._settings = settings
        self._router = router
        self._policy = policy
        self.url = ""
        self.nodes: dict[NodeName, NodeService] = {
            NodeName(name): self._service(NodeName(name)) for name in names
        }

    def client(self, key: str | None = None) -> ChatClient:
        """Return a client of the tenant with this key."""
        return ChatClient(self.url, Path(self._model).name, key)

    def node(self, name: str) -> NodeService:
        """Return a node."""
        return self.nodes[NodeName(name)]

    def agent(self, node: str, agent: str, tenant: str = "default") -> Agent:
        """Return a node's own object of an agent."""
        table = self.node(node).node.resources.table
        return table.require((TenantId(tenant), AgentId(agent)))

    def hold(self, node: str, size_bytes: int) -> None:
        """Set the memory limit of a node's caches."""
        self.node(node).node.resources.engine.budget.resize(size_bytes)

    def drop(self, node: str) -> None:
        """Drop all caches of a node from memory."""
        hot = self.node(node).node.tiers.hot
        self.node(node)._on_loop(_called(lambda: hot.drop_resident(0))).result()  # noqa: SLF001

    def start(self, before_router: Callable[["LocalFabric"], None] = lambda _: None) -> None:
        """Start the nodes, call `before_router`, then start the router, which links the nodes."""
        for service in self.nodes.values():
            service.start()
        before_router(self)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        is_ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        work = serve_roster(
            self._router,
            KEY,
            self._roster,
            [listener],
            on_ready=lambda *_: is_ready.set(),
            placement=Placement(self._policy),
        )
        self._serving = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        is_ready.wait()

    def stop(self) -> None:
        """Stop the router, then the nodes."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        for service in self.nodes.values():
            service.stop()

    def _service(self, name: NodeName) -> NodeService:
        folder = self._folder / name
        return NodeService(
            NodeConfig(name, folder, self._model, KEY, self._settings, "127.0.0.1", 1)
        )

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            self._loop.close()

    async def _roster(self) -> Mapping[NodeName, ControlTransport]:
        return {name: self._transport(name) for name in self.nodes}

    def _transport(self, name: NodeName) -> ControlTransport:
        async def send(raw: bytes) -> bytes:
            return await asyncio.wrap_future(self.nodes[name].control(raw))

        return send


async def _called(work: Callable[[], object]) -> None:
    work()


@contextmanager
def local_fabric(
    model: str,
    *,
    nodes: Sequence[str] = ("node-a",),
    settings: NodeSettings | None = None,
    router: RouterSettings | None = None,
    policy: Policy = Policy.SECONDS,
    before_router: Callable[[LocalFabric], None] = lambda _: None,
    data: Path | None = None,
) -> Iterator[LocalFabric]:
    """Run a fabric for a block of code; its data are removed unless `data` is their folder."""
    with tempfile.TemporaryDirectory() as folder:
        fabric = LocalFabric(
            data or Path(folder),
            model,
            nodes,
            settings or NodeSettings(durability="none", popular_bytes=0),
            router or RouterSettings(),
            policy,
        )
        fabric.start(before_router)
        try:
            yield fabric
        finally:
            fabric.stop()
