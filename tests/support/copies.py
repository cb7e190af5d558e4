"""Copies of agents between real nodes, made by the router's own calls."""

import itertools

from fabric.control.node_calls import AbortMigration, AgentView, Copied, CopyBlocks, Done, Offer
from fabric.control.replica_calls import KeepFork, KeepReplica, OfferCopy
from fabric.ids import AgentId, MigrationId, NodeName, OperationId
from fabric.net.wire import Urgency
from node.service import NodeService
from tests.support.services import TENANT, call

_names = itertools.count()


def copied_offer(
    source: NodeService, target: NodeService, agent: str, epoch: int, *, background: bool = False
) -> tuple[MigrationId, Offer, Copied | None]:
    """Offer an agent's record, and copy its blocks to another node."""
    name = MigrationId(f"copy-{next(_names):06d}")
    to = NodeName(target.node.name)
    offer = call(source, OfferCopy(TENANT, AgentId(agent), epoch, name, to), Offer)
    if source is target:
        return name, offer, None
    urgency = Urgency.PREFETCH if background else Urgency.FETCH
    blocks = CopyBlocks(name, NodeName(source.node.name), offer, urgency)
    return name, offer, call(target, blocks, Copied)


def withdraw(service: NodeService, name: MigrationId, agent: str) -> None:
    """End an offer or a copy."""
    call(service, AbortMigration(TENANT, AgentId(agent), name), Done)


def fork(
    source: NodeService,
    target: NodeService,
    agent: str,
    name: str,
    *,
    epoch: int = 1,
    operation: str = "operation-1",
) -> AgentView:
    """Fork an agent."""
    migration, offer, _ = copied_offer(source, target, agent, epoch)
    keep = KeepFork(migration, offer.manifest, OperationId(operation), AgentId(name), 1)
    view = call(target, keep, AgentView)
    withdraw(source, migration, agent)
    return view


def replicate(
    source: NodeService,
    target: NodeService,
    agent: str,
    *,
    epoch: int = 1,
    kept: bool = True,
    background: bool = False,
) -> tuple[AgentView, Copied]:
    """Make or refresh a replica."""
    migration, offer, copied = copied_offer(source, target, agent, epoch, background=background)
    keep = KeepReplica(migration, offer.manifest, NodeName(source.node.name), kept)
    view = call(target, keep, AgentView)
    withdraw(source, migration, agent)
    assert copied is not None, "source and target must differ"
    return view, copied
