"""The table of control calls: what each one is, what answers it, and how it is made.

One dataclass in and one out, as msgpack bytes: whatever carries them (a Ray actor call, HTTP, a
test) decodes nothing but what is in the table.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from fabric.codec import pack, unpack
from fabric.control.copy_calls import (
    DrainNode,
    KeepFork,
    KeepReplica,
    OfferCopy,
    OfferSpans,
    PrefetchAgent,
    ReturnSpans,
    SpanOffers,
    TakeOver,
    TakeSpan,
)
from fabric.control.directive_calls import (
    CoolAgent,
    DirectAgent,
    DropReplica,
    MemoryView,
    ReadMemory,
    WishOfAgent,
)
from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.node_calls import (
    AbortMigration,
    AgentList,
    AgentView,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Describe,
    Done,
    Flush,
    ListAgents,
    NodeView,
    Offer,
    OfferMigration,
    PinAgent,
    ReleaseAgent,
    SealAgent,
    Stop,
)
from fabric.errors import RejectedError
from fabric.limits import (
    CONTROL_TIMEOUT_S,
    COPY_TIMEOUT_S,
    HEARTBEAT_S,
    NEWCOMER_TIMEOUT_S,
    PREFETCH_TIMEOUT_S,
)
from fabric.net.links import PeerList

Reply = TypeVar("Reply")

CONTROL_PATH: Final = "/internal/control"
NODE_HEADER: Final = "x-macfabric-node"  # whom the call is meant for: an address may change hands


class CallRoute(Enum):
    """The transport of a control call."""

    ACTOR = "actor"
    # As tokens travel, for calls that a client's next token waits for. A call of a Ray actor and
    # its answer take 3.7 ms where a request over HTTP takes 1.8 (two shared cores, 35 kB), and a
    # move makes two of them while its agent is silent. Such a call may arrive twice, even while
    # the first is still being carried out, and is answered alike.
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One control call."""

    name: str
    message: type
    reply: type
    timeout_s: float = CONTROL_TIMEOUT_S
    route: CallRoute = CallRoute.ACTOR
    waits: bool = False  # for an agent's turn or memory, as often as its tenant asks
    to_lost: bool = False  # goes on though the node's lease is over: by it a node comes back


# What makes an agent durable: blocks still in memory go to disk.
_SAVE_TIMEOUT_S: Final = 60.0
_SPECS: Final = (
    CallSpec("describe", Describe, NodeView, to_lost=True),
    CallSpec("list_agents", ListAgents, AgentList),
    CallSpec("erase_agent", EraseAgent, EraseReceipt, to_lost=True),
    CallSpec("share_erasures", ShareErasures, KnownErasures, to_lost=True),
    CallSpec("pin_agent", PinAgent, AgentView, waits=True),
    CallSpec("direct_agent", DirectAgent, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("wish_of_agent", WishOfAgent, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("read_memory", ReadMemory, MemoryView),
    CallSpec("cool_agent", CoolAgent, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("drop_replica", DropReplica, Done),
    CallSpec("offer_migration", OfferMigration, Offer, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("copy_blocks", CopyBlocks, Copied, COPY_TIMEOUT_S),
    CallSpec("seal_agent", SealAgent, Offer, _SAVE_TIMEOUT_S, CallRoute.HTTP),
    # The tail comes first; the agent is served nowhere meanwhile.
    CallSpec("commit_migration", CommitMigration, Committed, 180.0, CallRoute.HTTP),
    CallSpec("release_agent", ReleaseAgent, Done),
    CallSpec("abort_migration", AbortMigration, Done),
    CallSpec("offer_copy", OfferCopy, Offer, waits=True),
    CallSpec("keep_replica", KeepReplica, AgentView, _SAVE_TIMEOUT_S),
    CallSpec("keep_fork", KeepFork, AgentView, _SAVE_TIMEOUT_S),
    CallSpec("take_over", TakeOver, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("offer_spans", OfferSpans, SpanOffers, _SAVE_TIMEOUT_S),
    CallSpec("take_span", TakeSpan, Copied, NEWCOMER_TIMEOUT_S),
    CallSpec("return_spans", ReturnSpans, Done),
    CallSpec("prefetch_agent", PrefetchAgent, AgentView, PREFETCH_TIMEOUT_S, waits=True),
    CallSpec("drain_node", DrainNode, Done),
    CallSpec("meet_peers", PeerList, Done, 2 * HEARTBEAT_S),
    CallSpec("flush", Flush, Done, 120.0),  # of which it waits FLUSH_WAIT_S for turns
    CallSpec("stop", Stop, Done),
)
CALLS: Final = {spec.name: spec for spec in _SPECS}
_BY_MESSAGE: Final = {spec.message: spec for spec in _SPECS}


def spec_of(message: type) -> CallSpec:
    """Return how calls of this class are made."""
    return _BY_MESSAGE[message]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A FabricError on its way back to the caller."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NamedMessage:
    """A named call or reply; the name must stand in the receiver's table."""

    name: str
    body: bytes = field(repr=False)


def encode_call(call: object) -> bytes:
    """Encode any call of `CALLS`."""
    return pack(NamedMessage(spec_of(type(call)).name, pack(call)))


def is_call(raw: bytes, kind: type) -> bool:
    """Say whether an encoded call is a `kind`, without decoding what is in it."""
    with suppress(RejectedError):
        return unpack(NamedMessage, raw).name == spec_of(kind).name
    return False


def decode_call(raw: bytes) -> tuple[str, object]:
    """Return the call's name and message; raise RejectedError if it is none of `CALLS`."""
    envelope = unpack(NamedMessage, raw)
    if envelope.name not in CALLS:
        message = "unknown control call"
        raise RejectedError(message, code="unknown_call")
    return envelope.name, unpack(CALLS[envelope.name].message, envelope.body)


def encode_reply(reply: object) -> bytes:
    """Encode a reply or an ErrorReply."""
    name = "error" if isinstance(reply, ErrorReply) else "ok"
    return pack(NamedMessage(name, pack(reply)))


def decode_reply(kind: type[Reply], raw: bytes) -> Reply | ErrorReply:
    """Decode the reply to a call whose answer is a `kind`."""
    envelope = unpack(NamedMessage, raw)
    if envelope.name == "error":
        return unpack(ErrorReply, envelope.body)
    return unpack(kind, envelope.body)
