"""A whole fabric whose nodes are processes that can be killed and restarted on their disks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fabric.ids import NodeName
from fabric.settings import NodeSettings
from node.runtime.identity import NodeConfig
from tests.support.local_fabric import LocalFabric
from tests.support.node_process import NodeProcess
from tests.support.services import KEY


class ProcessFabric(LocalFabric):
    """The real router in this process, with real HTTP and TCP to nodes that may die."""

    def _start(self, name: str) -> NodeProcess:
        settings = dict(self._settings)
        step_s = settings.pop("step_s", 0.0)
        self._lives = getattr(self, "_lives", 0) + 1
        config = NodeConfig(
            name=NodeName(name),
            data_dir=self._folder / name,
            model=self._model,
            cluster_key=KEY,
            settings=NodeSettings(**{"durability": "none", **settings}),
            host="127.0.0.1",
            incarnation=self._lives,
        )
        return NodeProcess(config, step_s)

    @property
    def model_name(self) -> str:
        """Name of the model the nodes serve."""
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def _incarnations(self) -> set[int]:
        return {node.incarnation for node in self.services.values()}

    def kill(self, name: str) -> None:
        """Kill a node; the router is not notified."""
        self.services[name].kill()

    def revive(self, name: str) -> None:
        """Start a node that was killed; return when it serves."""
        self.services[name] = self._start(name)


@contextmanager
def process_fabric(
    folder: Path, model: str, *names: str, **settings: Any
) -> Iterator[ProcessFabric]:
    """Run a fabric for a block of code; each token takes `step_s` longer."""
    fabric = ProcessFabric(folder, model, list(names), **settings)
    try:
        yield fabric
    finally:
        fabric.stop()
