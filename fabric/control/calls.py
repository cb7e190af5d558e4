"""Table of control calls: the message, reply, timeout and transport of each.

Each call and each reply is one dataclass, packed as msgpack. Receivers decode only what the table
lists, whatever carries the bytes (a Ray actor call, HTTP, a test).
"""

from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from fabric.codec import left_out, pack, unpack, unpack_newer
from fabric.control.change_calls import AgentChanges, DescribeChanges, ListChanges, ViewChanges
from fabric.control.directive_calls import ChangeSettings, DirectAgent, MemoryView, ReadMemory
from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.head_calls import HeadOffer, OfferHead
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
    DrainNode,
    DropResident,
    Flush,
    ListAgents,
    NodeView,
    Offer,
    OfferMigration,
    PinAgent,
    PrefetchAgent,
    ReleaseAgent,
    Restart,
    SealAgent,
    Stop,
)
from fabric.control.replica_calls import DropReplica, KeepFork, KeepReplica, OfferCopy, TakeOver
from fabric.control.span_calls import OfferSpans, ReturnSpans, SpanOffers, TakeSpan
from fabric.control.term_calls import GrantTerm, TermAnswer
from fabric.control.turn_calls import ReadTurns, TurnsView
from fabric.errors import RejectedError
from fabric.ids import Traceparent, TurnId, parse_traceparent, parse_turn_id
from fabric.limits import (
    CONTROL_TIMEOUT_S,
    COPY_TIMEOUT_S,
    HEAD_POLL_S_MAX,
    HEARTBEAT_S,
    PREFETCH_TIMEOUT_S,
    PREFIX_SEEDING_TIMEOUT_S,
)
from fabric.net.links import PeerList

Reply = TypeVar("Reply")

CONTROL_PATH: Final = "/internal/control"
UNKNOWN_CALL: Final = "unknown_call"  # code of the error for a call that is not in the table
NODE_HEADER: Final = "x-macfabric-node"  # called node: its address may have been reassigned


class CallRoute(Enum):
    """Transport of a control call."""

    ACTOR = "actor"
    # For calls that a client's next token waits for. An actor call takes 3.7 ms where HTTP takes
    # 1.8 ms (two shared cores, 35 kB), and a move makes two calls while its agent is paused. Such
    # a call may arrive twice, even while the first is being handled; both get the same reply.
    HTTP = "http"
    # From node to node, over the data plane, for a turn on the caller. Such calls change
    # nothing but tickets.
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Specification of one control call."""

    name: str
    message: type
    reply: type
    timeout_s: float = CONTROL_TIMEOUT_S
    route: CallRoute = CallRoute.ACTOR
    waits: bool = False  # for an agent's turn or memory; its tenant decides how often
    to_lost: bool = False  # also made after the node's lease expired: the node rejoins by it
    is_open: bool = False  # to routers without a term, too: they cannot disagree about it


# For calls that make an agent durable by writing its blocks from memory to disk.
_SAVE_TIMEOUT_S: Final = 60.0
_SPECS: Final = (
    CallSpec("describe", Describe, NodeView, to_lost=True, is_open=True),
    CallSpec("list_agents", ListAgents, AgentList, is_open=True),
    CallSpec("describe_changes", DescribeChanges, ViewChanges, to_lost=True, is_open=True),
    CallSpec("list_changes", ListChanges, AgentChanges, is_open=True),
    CallSpec("erase_agent", EraseAgent, EraseReceipt, to_lost=True),
    CallSpec("share_erasures", ShareErasures, KnownErasures, to_lost=True, is_open=True),
    CallSpec("pin_agent", PinAgent, AgentView, waits=True),
    CallSpec("direct_agent", DirectAgent, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("wish_of_agent", ChangeSettings, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("read_memory", ReadMemory, MemoryView, is_open=True),
    CallSpec("read_turns", ReadTurns, TurnsView, is_open=True),
    CallSpec("cool_agent", DropResident, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("drop_replica", DropReplica, Done),
    CallSpec("offer_migration", OfferMigration, Offer, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("copy_blocks", CopyBlocks, Copied, COPY_TIMEOUT_S),
    CallSpec("seal_agent", SealAgent, Offer, _SAVE_TIMEOUT_S, CallRoute.HTTP),
    # The target fetches the tail first; no node serves the agent meanwhile.
    CallSpec("commit_migration", CommitMigration, Committed, 180.0, CallRoute.HTTP),
    CallSpec("release_agent", ReleaseAgent, Done),
    CallSpec("abort_migration", AbortMigration, Done),
    CallSpec("offer_copy", OfferCopy, Offer, waits=True),
    CallSpec("keep_replica", KeepReplica, AgentView, _SAVE_TIMEOUT_S),
    CallSpec("keep_fork", KeepFork, AgentView, _SAVE_TIMEOUT_S),
    CallSpec("take_over", TakeOver, AgentView, _SAVE_TIMEOUT_S, waits=True),
    CallSpec("offer_spans", OfferSpans, SpanOffers, _SAVE_TIMEOUT_S),
    CallSpec("take_span", TakeSpan, Copied, PREFIX_SEEDING_TIMEOUT_S),
    CallSpec("return_spans", ReturnSpans, Done),
    CallSpec("offer_head", OfferHead, HeadOffer, HEAD_POLL_S_MAX, CallRoute.PEER, is_open=True),
    CallSpec("prefetch_agent", PrefetchAgent, AgentView, PREFETCH_TIMEOUT_S, waits=True),
    CallSpec("drain_node", DrainNode, Done),
    CallSpec("meet_peers", PeerList, Done, 2 * HEARTBEAT_S),
    CallSpec("flush", Flush, Done, 120.0, is_open=True),  # including FLUSH_WAIT_S for running turns
    CallSpec("stop", Stop, Done, is_open=True),
    CallSpec("restart", Restart, Done, _SAVE_TIMEOUT_S),  # and the wait for turns that it names
    # By HTTP, which needs nothing of Ray's head, and sooner than the lease that it renews.
    CallSpec("grant_term", GrantTerm, TermAnswer, 1.0, CallRoute.HTTP, to_lost=True, is_open=True),
)
CALLS: Final = {spec.name: spec for spec in _SPECS}
_BY_MESSAGE: Final = {spec.message: spec for spec in _SPECS}


def spec_of(message: type) -> CallSpec:
    """Return the specification of a call by its message class."""
    return _BY_MESSAGE[message]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """FabricError that a node returns to the caller."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NamedMessage:
    """Call or reply with its name, which must be in the receiver's table."""

    name: str
    body: bytes = field(repr=False)
    term: int | None = field(default=None, metadata=left_out())  # of the calling router
    # The turn that the call is made for, and its span; only for nodes that read them.
    turn: TurnId | None = field(default=None, metadata=left_out())
    trace: Traceparent | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Origin of a call: its router's term, and the turn and span it belongs to, if known."""

    term: int | None = None
    turn: TurnId | None = None
    trace: Traceparent | None = None


NO_ORIGIN: Final = CallOrigin()


def encode_call(call: object, term: int | None = None, origin: CallOrigin = NO_ORIGIN) -> bytes:
    """Encode a call of `CALLS`, with the term of the router that makes it, or its whole origin."""
    term = origin.term if term is None else term
    name = spec_of(type(call)).name
    return pack(NamedMessage(name, pack(call), term, origin.turn, origin.trace))


def is_call(raw: bytes, kind: type) -> bool:
    """Return whether an encoded call is a `kind`, without decoding its body."""
    with suppress(RejectedError):
        return unpack(NamedMessage, raw).name == spec_of(kind).name
    return False


def decode_call(raw: bytes) -> tuple[object, CallOrigin]:
    """Return the call's message and origin; raise RejectedError if it is not in `CALLS`."""
    envelope = unpack(NamedMessage, raw)
    if envelope.name not in CALLS:
        message = "unknown control call"
        raise RejectedError(message, code=UNKNOWN_CALL)
    turn = None if envelope.turn is None else parse_turn_id(envelope.turn)
    trace = None if envelope.trace is None else parse_traceparent(envelope.trace)
    origin = CallOrigin(envelope.term, turn, trace)
    return unpack(CALLS[envelope.name].message, envelope.body), origin


def encode_reply(reply: object) -> bytes:
    """Encode a reply, or an ErrorReply."""
    name = "error" if isinstance(reply, ErrorReply) else "ok"
    return pack(NamedMessage(name, pack(reply)))


def decode_reply(kind: type[Reply], raw: bytes) -> Reply | ErrorReply:
    """Decode the reply to a call that is answered with a `kind`, also by a newer node."""
    envelope = unpack(NamedMessage, raw)
    if envelope.name == "error":
        return unpack_newer(ErrorReply, envelope.body)
    return unpack_newer(kind, envelope.body)
