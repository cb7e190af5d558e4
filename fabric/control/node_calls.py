"""Control messages between router and node: small, idempotent, fenced by epoch.

Which there are, and how each is made, says `fabric.control.calls`.
"""

from dataclasses import dataclass, field
from typing import Final

from fabric.control.agent_at import AgentAt, AgentName, OfferRequest
from fabric.control.directive_calls import DirectiveView
from fabric.ids import MigrationId, NodeName
from fabric.limits import BODY_BYTES_MAX
from fabric.net.links import Address, LinkView
from fabric.net.wire import Urgency
from fabric.record.edited_head import EditNote
from fabric.record.manifest import OwnerState
from fabric.record.wishes import Wishes

READY: Final = "ready"
DRAINING: Final = "draining"  # takes no new agents, and its own leave


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of agents' caches by tier."""

    hot: int
    disk: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Did a stored agent really come back when this node started?"""

    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LastMatch:
    """Match of the last prompt with the agent's KV cache."""

    kind: str
    cached_tokens: int
    prompt_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class AgentView(AgentName):
    """One agent as one node sees it."""

    group: str | None
    node: NodeName
    state: OwnerState
    epoch: int
    revision: int
    tokens: int
    blocks: int
    bytes: TierBytes
    tiers: tuple[str, ...]
    busy: bool
    created_s: float
    used_s: float
    last_match: LastMatch | None = None
    sealed_to: NodeName | None = None
    migration: MigrationId | None = None  # the one that sealed it, or that brought it here
    durable: bool = False  # the disk holds all that memory does
    pinned: bool = False
    pin_held: bool = False  # it fits; a pin beyond its tenant's part counts for nothing
    kept: bool = False  # a replica made on purpose, which follows its owner
    tail: str = ""  # of the last saved block's name, which stands for all tokens up to its end
    exact_tokens: int | None = None  # before the first edit that its memory was kept behind
    edits: tuple[EditNote, ...] = ()  # the newest of those
    directives: tuple[DirectiveView, ...] = ()
    wishes: Wishes | None = None


PRESSURES: Final = ("normal", "warning", "critical")  # how short a machine is of memory
THERMAL_STATES: Final = ("nominal", "fair", "serious", "critical")  # by NSProcessInfo's number


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node's state, as its heartbeat tells it."""

    name: NodeName
    host: str
    pid: int
    incarnation: int
    http_url: str
    model: str
    fingerprint: str
    context_tokens_max: int
    state: str  # READY, DRAINING or "stopping"
    agents: int
    tokens: int
    bytes: TierBytes
    addresses: tuple[Address, ...]
    waiting: int
    active: int
    queue_s: float  # seconds of prefill already promised
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_per_token: int
    self_test: SelfTest
    degraded: str | None = None  # e.g. why the disk tier refuses writes
    reuse: bool = True
    changes: int = 0  # counter of agent changes: unchanged means ListAgents says the same
    evicted_agents: int = 0  # expired, or gone for lack of room, since the node's start
    scrubbed_bytes: int = 0  # stored blocks read again in idle moments, since the node's start
    damaged_blocks: int = 0  # found by reads and scrubs and taken out of use, since then
    free: TierBytes | None = None  # of its budgets, as far as it knows
    links: tuple[LinkView, ...] = ()  # to every address of every peer it was told of
    erased: int = 0  # fingerprint of the tombstones it keeps
    fenced_turns: int = 0  # ended because another node owned the agent by then
    failed_rounds: int = 0  # of background work (saving again, reclaiming, scrubbing), ditto
    sending: dict[str, int] = field(default_factory=dict)  # `transfer_counts.SENDING`
    fetching: dict[str, int] = field(default_factory=dict)  # `transfer_counts.FETCHING`
    hot_limit_bytes: int = 0  # for agents' caches now: less than planned under memory pressure
    hot_total_bytes: int = 0  # for agents' caches, as planned
    memory_pressure: str = PRESSURES[0]  # of its machine: one of PRESSURES
    thermal_state: str = THERMAL_STATES[0]  # of its machine: one of THERMAL_STATES
    prompt_bytes_max: int = BODY_BYTES_MAX  # of text: no longer prompt fits the context


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for the node's state; doubles as the heartbeat."""


@dataclass(frozen=True, slots=True)
class ListAgents:
    """Ask for the agents that changed after `since`, with their sketches; 0: for all."""

    incarnation: int = 0  # which `since` counts changes of
    since: int = 0


@dataclass(frozen=True, slots=True)
class AgentSketch:
    """An agent and what its conversation looks like."""

    view: AgentView
    sketch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgentList:
    """A node's agents, the one that changed first first: all, or what is new after `since`."""

    node: NodeName
    incarnation: int
    changes: int  # up to which one this tells everything
    agents: tuple[AgentSketch, ...]
    since: int = 0  # 0: whoever is not listed is not there
    gone: tuple[AgentName, ...] = ()  # held at `since`, and no more
    more: bool = False  # ask for what came after `changes`


@dataclass(frozen=True, slots=True)
class PinAgent(AgentName):
    """To the owner: let this agent go last, or like any other."""

    pinned: bool


@dataclass(frozen=True, slots=True)
class OfferMigration(OfferRequest):
    """To the source: make the agent's blocks durable and say what they are."""

    verify: bool = False  # a copy of them arrived damaged: read what is stored first


@dataclass(frozen=True, slots=True)
class Offer:
    """The source's record, a ticket for its blocks, and where to fetch them."""

    manifest: bytes
    ticket: bytes
    addresses: tuple[Address, ...]
    live: bool = False  # a turn runs: the record grows, and somebody waits for what follows


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """To the target: fetch and publish what it lacks of the offered record."""

    migration: MigrationId
    source: NodeName
    offer: Offer
    urgency: Urgency = Urgency.MIGRATION_COPY


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a copy; `blocks_reused` were there already."""

    blocks_sent: int
    blocks_reused: int
    bytes_sent: int
    seconds: float


NOTHING_COPIED: Final = Copied(0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class SealAgent(OfferRequest):
    """To the source: serve no further turn until this migration is decided."""


@dataclass(frozen=True, slots=True)
class CommitMigration:
    """To the target: fetch the end of the sealed record, then own the agent at `epoch`.

    Its durable publish is the commit.
    """

    migration: MigrationId
    source: NodeName
    offer: Offer
    epoch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The agent as its target owns it, and what had to be copied for it yet."""

    view: AgentView
    copied: Copied


@dataclass(frozen=True, slots=True)
class ReleaseAgent(AgentAt):
    """To the source: the target owns `epoch`; keep the bytes as a replica."""

    migration: MigrationId
    owner: NodeName


@dataclass(frozen=True, slots=True)
class AbortMigration(AgentName):
    """To either side: forget it; a sealed source owns and serves again."""

    migration: MigrationId


@dataclass(frozen=True, slots=True)
class Flush:
    """Make every agent durable; with `drop_hot`, also free the resident caches."""

    drop_hot: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish or cancel the running turns, make everything durable, and exit."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to say beyond success."""

    detail: str = ""
