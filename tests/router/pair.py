"""Two routers over fake nodes, in one event loop: one is active, the other follows it."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest import mock

import httpx2

from fabric.settings import RouterSettings
from router import serve as serving_module
from router.app import build_app
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.term_keeper import TermKeeper
from router.listener import listen, urls_of
from router.serve import serve_roster
from tests.router.fake_node import CLUSTER_KEY, FakeNode
from tests.router.rig import OPERATOR_KEY, until

TENANT_KEY = "key-of-one-tenant-here"
AUTH = {"authorization": f"Bearer {TENANT_KEY}"}


class Pair:
    """Fake nodes and the routers over them."""

    def __init__(self, nodes, folder=None):
        self._folder = folder
        self.nodes = {node.name: node for node in nodes}
        self.routers = []

    async def start(self, **changes):
        settings = RouterSettings(
            **{
                "standby": True,
                "nodes_expected": len(self.nodes),
                "takeover_after_s": 20.0,
                "api_keys": {"one": TENANT_KEY},
                "operator_keys": {"ops": OPERATOR_KEY},
                "stop_wait_s": 0.0,
                **changes,
            }
        )
        listeners = listen("127.0.0.1", 0)

        async def roster():
            return self.nodes

        keepers = []

        def keeper(*arguments, **options):
            keepers.append(TermKeeper(*arguments, **options))
            return keepers[0]

        apps = []

        def build(*arguments):
            apps.append(build_app(*arguments))
            return apps[0]

        with (
            mock.patch.object(serving_module, "TermKeeper", keeper),
            mock.patch.object(serving_module, "build_app", build),
        ):
            work = serve_roster(
                settings,
                CLUSTER_KEY,
                roster,
                listeners,
                on_ready=lambda *_: None,
                expected=ExpectedNodes(len(self.nodes)),
                runs_dir=self._folder and self._folder / f"runs-{len(self.routers)}",
            )
            task = asyncio.create_task(work)
            await until(lambda: apps)
        url = urls_of(listeners)[0]
        http = httpx2.AsyncClient(base_url=url, verify=False, timeout=30)
        router = SimpleNamespace(keeper=keepers[0], app=apps[0], url=url, http=http, task=task)
        self.routers.append(router)
        return router

    async def stop(self, router):
        """Stop a router in order; its client connections stay open."""
        router.task.cancel()
        await asyncio.gather(router.task, return_exceptions=True)

    async def close(self):
        for router in self.routers:
            await router.http.aclose()
            router.task.cancel()
        await asyncio.gather(*(router.task for router in self.routers), return_exceptions=True)
        for node in self.nodes.values():
            await node.stop()


@asynccontextmanager
async def pair(names="abc", folder=None, **settings):
    """Start a router, wait until it is active, and start a second one."""
    fabric = Pair([FakeNode(f"node-{letter}") for letter in names], folder)
    try:
        for node in fabric.nodes.values():
            await node.start()
        one = await fabric.start(**settings)
        await until(lambda: one.keeper.is_active)
        two = await fabric.start(**settings)
        await until(lambda: two.keeper.active_url == one.url)
        yield fabric, one, two
    finally:
        await fabric.close()
