"""Erasures on a real node, and the state to examine afterwards."""

import errno
import itertools

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import (
    AgentList,
    ListAgents,
)
from fabric.ids import OperationId
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from tests.support.services import TENANT, call

PROMPT = "the cat sat on the mat and the dog sat on the log. " * 8
ATTEMPTS = 2
_operations = itertools.count()


def erase(service, agent, epoch=1_001, operation=None):
    now_s = service.node.resources.clock.wall_s()
    name = OperationId(operation or f"test-erase-{next(_operations)}")
    return call(service, EraseAgent(TENANT, agent, epoch, name, now_s), EraseReceipt)


def agents(service):
    return {
        item.view.agent: item.view.epoch for item in call(service, ListAgents(), AgentList).agents
    }


def blocks(folder):
    return sorted(path.name for path in folder.glob("node-a/*/blocks/*.full"))


class Refusal:
    """Call of the store that fails with a disk error until `is_mended`."""

    def __init__(self, monkeypatch, name):
        self.count, self.is_mended = 0, False
        real = getattr(AgentStore, name)

        def call(store, *args):
            if self.is_mended:
                return real(store, *args)
            self.count += 1
            message = "the drive refused"
            raise DiskError(message, errno.EIO)

        monkeypatch.setattr(AgentStore, name, call)


def files(folder, *directories):
    """List the files below the folders of all models."""
    return sorted(
        path.name
        for directory in directories or ("blocks", "manifests", "quarantine")
        for path in folder.glob(f"node-a/*/{directory}/*")
    )
