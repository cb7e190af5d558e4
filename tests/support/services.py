"""Real node services in this process, with the router's own calls."""

import asyncio
import itertools
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import (
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Done,
    Offer,
    OfferMigration,
    ReleaseAgent,
    SealAgent,
)
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, MigrationId, NodeName, OperationId, TenantId
from fabric.settings import NodeSettings
from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from fabric.turn.generation import (
    Admitted,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
    TurnTag,
)
from node import service as node_service
from node.service import NodeConfig, NodeService
from tests.support.conversations import read_messages
from tests.support.known_models import load_known
from tests.support.known_starts import KnownService

T = TypeVar("T")
KEY = bytes(range(32))
CALL_S = 600.0
TENANT = TenantId("default")
_operations = itertools.count()
_incarnations = itertools.count(1)
node_service.load_model = load_known


@dataclass
class Reply:
    """The events of a turn."""

    events: list[Event] = field(default_factory=list)

    @property
    def admitted(self) -> Admitted:
        """The first event."""
        first = self.events[0]
        assert isinstance(first, Admitted)
        return first

    @property
    def text(self) -> str:
        """The visible answer."""
        return "".join(e.text for e in self.events if isinstance(e, Delta) and not e.reasoning)

    @property
    def finished(self) -> Finished:
        """The last event."""
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last


def start_service(
    folder: Path,
    model: str,
    name: str = "node-a",
    *,
    cluster_key: bytes = KEY,
    tls: ssl.SSLContext | None = None,
    tries_everything: bool = False,
    **settings: Any,
) -> NodeService:
    """Start a node on `folder`, with durability off: tests restart nodes but never lose power."""
    config = NodeConfig(
        name=NodeName(name),
        data_dir=folder / name,
        model=model,
        cluster_key=cluster_key,
        settings=NodeSettings(**{"durability": "none", **settings}),
        host="127.0.0.1",
        incarnation=next(_incarnations),
        tls=tls,
    )
    service = NodeService(config) if tries_everything else KnownService(config)
    service.start()
    return service


@contextmanager
def running(
    folder: Path, model: str, name: str = "node-a", **settings: Any
) -> Iterator[NodeService]:
    """Run a node for a block of code."""
    service = start_service(folder, model, name, **settings)
    try:
        yield service
    finally:
        service.stop()


def call(service: NodeService, message: object, kind: type[T], term: int | None = None) -> T:
    """Make one control call; raise the node's error."""
    reply = decode_reply(kind, service.control(encode_call(message, term)).result(CALL_S))
    if isinstance(reply, ErrorReply):
        error = FabricError(reply.message, code=reply.code)
        error.status = reply.status
        raise error
    return reply


def identity_of(agent: str | None, group: str | None = None) -> Identity:
    """Build an identity."""
    if agent is not None:
        return Identity(IdentityKind.AGENT, AgentId(agent))
    if group is not None:
        return Identity(IdentityKind.GROUP, AgentId(group))
    return Identity(IdentityKind.CONTENT)


def ask(
    service: NodeService,
    messages: list[dict[str, Any]] | str,
    *,
    agent: str | None = None,
    group: str | None = None,
    tenant: TenantId = TENANT,
    tools: list[Any] | None = None,
    calls: CallChoice = ANY_CALLS,
    epoch: int = 0,
    was_admitted: bool = False,
    retain_s: float = 0.0,
    edits: EditMode | None = None,
    term: int | None = None,
    turn: TurnTag | None = None,
    **sampling: Any,
) -> Reply:
    """Run one turn to its end."""
    request = GenerateRequest(
        operation=OperationId(f"test-op-{next(_operations):06d}"),
        tenant=tenant,
        identity=identity_of(agent, group),
        sampling=Sampling(**{"max_tokens": 24, **sampling}),
        messages=None if isinstance(messages, str) else read_messages(messages),
        prompt=messages if isinstance(messages, str) else None,
        tools=tools,
        calls=calls,
        epoch=epoch,
        was_admitted=was_admitted,
        retain_s=retain_s,
        edits=edits,
        term=term,
        turn=turn,
    )

    async def drain() -> Reply:
        return Reply([event async for event in service.node.turns.serve(request)])

    return asyncio.run_coroutine_threadsafe(drain(), service._loop).result(120)


def migrate(source: NodeService, target: NodeService, agent: str, epoch: int) -> Copied:
    """Move an agent by the router's calls."""
    migration, agent_id = MigrationId(f"migration-{epoch}"), AgentId(agent)
    to, frm = NodeName(target.node.name), NodeName(source.node.name)
    offer = call(source, OfferMigration(TENANT, agent_id, epoch, migration, to), Offer)
    copied = call(target, CopyBlocks(migration, frm, offer), Copied)
    sealed = call(source, SealAgent(TENANT, agent_id, epoch, migration, to), Offer)
    call(target, CommitMigration(migration, frm, sealed, epoch + 1), Committed)
    call(source, ReleaseAgent(TENANT, agent_id, epoch + 1, migration, to), Done)
    return copied
