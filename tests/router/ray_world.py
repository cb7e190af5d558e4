"""A small real Ray with fake nodes as actors, for one test, controlled by lines on its input.

make NAME    kill NAME    quit
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import ray

from node.keys import read_keys
from tests.router.fake_node import FakeNode


class FakeActor:
    def __init__(self, name):
        keys = read_keys(Path(os.environ["MACFABRIC_TEST_KEYS"]))
        self._node = FakeNode(name, tls=keys.server_context())
        self._started = False

    async def process_id(self):
        return os.getpid()

    async def control(self, raw):
        if not self._started:
            await self._node.start()
            self._started = True
        return await self._node(raw)


def wait_gone(pid):
    """Wait for a process: Ray calls an actor dead before its process has ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.02)


def main():
    context = ray.init(
        num_cpus=1,
        include_dashboard=False,
        namespace="macfabric",
        object_store_memory=80_000_000,
        logging_level="ERROR",
        log_to_driver=False,
    )
    print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
    actors = {}
    for line in sys.stdin:
        order, _, name = line.strip().partition(" ")
        if order == "make":
            actor = ray.remote(FakeActor).options(
                name=f"macfabric-node-{name}", num_cpus=0, lifetime="detached"
            )
            actors[name] = actor.remote(f"{name}")
        elif order == "kill":
            actor = actors.pop(name)
            pid = ray.get(actor.process_id.remote())
            ray.kill(actor, no_restart=True)
            wait_gone(pid)
        else:
            break
        print(json.dumps({"done": order}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.set_event_loop(None)
    main()
