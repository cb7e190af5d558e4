"""Control messages of nodes, agents and migrations: small, idempotent, fenced by epoch.

`fabric.control.calls` lists all calls and how they are made.
"""

from dataclasses import dataclass, field
from typing import Final

from fabric.codec import left_out, on_wire
from fabric.control.agent_at import AgentAt, AgentName, OfferRequest
from fabric.control.directive_calls import DirectiveView
from fabric.control.term_calls import TermView
from fabric.control.usage_view import ExitView, UsageView
from fabric.ids import MigrationId, NodeName
from fabric.limits import BODY_BYTES_MAX
from fabric.net.links import Address, LinkView
from fabric.net.wire import Urgency
from fabric.record.edited_head import EditNote
from fabric.record.manifest import AgentSettings, OwnerState
from fabric.sampling_defaults import SamplingDefault

READY: Final = "ready"
ASLEEP: Final = "asleep"  # its machine is about to sleep, or has not reported since
DRAINING: Final = "draining"  # takes no new agents; those it has are moved away


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of agents' caches by tier."""

    hot: int
    disk: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Result of restoring a stored agent when the node started."""

    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LastMatch:
    """Match between the last prompt and the agent's KV cache."""

    kind: str
    cached_tokens: int
    prompt_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class AgentView(AgentName):
    """Agent as one node sees it."""

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
    migration: MigrationId | None = None  # the one that sealed it, or brought it to this node
    durable: bool = False  # the disk holds all that is in memory
    pinned: bool = False
    pin_held: bool = False  # within its tenant's share; pins beyond it have no effect
    kept: bool = False  # a replica that a client requested; it is kept up to date
    tail: str = ""  # name of the last saved block, which covers all tokens up to its end
    exact_tokens: int | None = None  # before the first edit that kept the cache after it
    edits: tuple[EditNote, ...] = ()  # the newest of those edits
    directives: tuple[DirectiveView, ...] = ()
    settings: AgentSettings | None = field(default=None, metadata=on_wire("wishes"))
    # Superseded forms of its conversation that are still stored; None: there are none.
    branches: int | None = field(default=None, metadata=left_out())


ORIGINS_SINCE: Final = 2  # first `CONTROL_VERSION` whose calls carry their turn and span
PRESSURES: Final = ("normal", "warning", "critical")  # memory pressure of a machine
THERMAL_STATES: Final = ("nominal", "fair", "serious", "critical")  # by NSProcessInfo's number


@dataclass(frozen=True, slots=True)
class NodeView:
    """State of a node, as of its heartbeat."""

    name: NodeName
    host: str
    pid: int
    incarnation: int
    http_url: str
    model: str
    fingerprint: str
    context_tokens_max: int
    state: str  # READY, DRAINING, ASLEEP or "stopping"
    agents: int
    tokens: int
    bytes: TierBytes
    addresses: tuple[Address, ...]
    waiting: int
    active: int
    queue_s: float  # prefill already accepted
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_per_token: int
    self_test: SelfTest
    degraded: str | None = None  # e.g. why the disk tier refuses writes
    reuse: bool = True
    changes: int = 0  # counts agent changes: while unchanged, ListAgents returns the same
    evicted_agents: int = 0  # expired or evicted since the node's start
    scrubbed_bytes: int = 0  # stored blocks verified while idle, since the node's start
    damaged_blocks: int = 0  # found by reads and scrubs and quarantined, since then
    free: TierBytes | None = None  # left of its budgets, if known
    links: tuple[LinkView, ...] = ()  # to every address of every known peer
    erased: int = 0  # fingerprint of the tombstones it keeps
    fenced_turns: int = 0  # ended because another node had become the owner
    failed_rounds: int = 0  # of background work (saving, reclaiming, scrubbing), since the start
    sending: dict[str, int] = field(default_factory=dict)  # `transfer_counts.SENDING`
    fetching: dict[str, int] = field(default_factory=dict)  # `transfer_counts.FETCHING`
    hot_limit_bytes: int = 0  # for agents' caches now; reduced under memory pressure
    hot_total_bytes: int = 0  # for agents' caches, as planned
    memory_pressure: str = PRESSURES[0]  # of its machine: one of PRESSURES
    thermal_state: str = THERMAL_STATES[0]  # of its machine: one of THERMAL_STATES
    prompt_bytes_max: int = BODY_BYTES_MAX  # of text; longer prompts cannot fit the context
    # What of the model's answers is read as plain text, as its template's format is unknown.
    template_warning: str | None = field(default=None, metadata=left_out())
    # Of requests that leave fields out; None: built in.
    sampling: tuple[SamplingDefault, ...] | None = field(default=None, metadata=left_out())
    router: TermView | None = field(default=None, metadata=left_out())  # None: it granted no term
    # Of its data plane; None: before nodes lent each other beginnings of prompts.
    protocol: int | None = field(default=None, metadata=left_out())
    # Versions by program; None: before turns had names and times.
    build: dict[str, str] | None = field(default=None, metadata=left_out())
    usage: UsageView | None = field(default=None, metadata=left_out())
    last_exit: ExitView | None = field(default=None, metadata=left_out())  # None: not known
    certificate_ends_s: float | None = field(default=None, metadata=left_out())  # wall clock
    # At which caches were read from its disk into memory; None: not measured.
    restore_bytes_per_s: float | None = field(default=None, metadata=left_out())
    # `CONTROL_VERSION` and `CONTROL_VERSION_MIN` of its code; None: 1, before they were reported.
    control: int | None = field(default=None, metadata=left_out())
    control_min: int | None = field(default=None, metadata=left_out())
    # Idle caches dropped from memory for space, and saves that the disk refused, since its start.
    dropped_caches: int | None = field(default=None, metadata=left_out())
    failed_saves: int | None = field(default=None, metadata=left_out())
    preempted_turns: int | None = field(default=None, metadata=left_out())  # since its start

    @property
    def reads_origins(self) -> bool:
        """Whether it reads calls that carry their turn and span."""
        return (self.control or 1) >= ORIGINS_SINCE


@dataclass(frozen=True, slots=True)
class Describe:
    """Request for the node's state; also the heartbeat."""


@dataclass(frozen=True, slots=True)
class ListAgents:
    """Request for the agents that changed after `since`, with sketches; 0 asks for all."""

    incarnation: int = 0  # to which `since` belongs
    since: int = 0


@dataclass(frozen=True, slots=True)
class AgentSketch:
    """Agent with the sketch of its conversation, and the hash of its form."""

    view: AgentView
    sketch: tuple[int, ...]  # from its beginning, or after `kept`
    form: int | None = field(default=None, metadata=left_out())
    # Number of leading pieces that the caller has, and the hash of the last of them.
    kept: tuple[int, int] | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class AgentList:
    """Agents of a node by time of change: all, or those that changed after `since`."""

    node: NodeName
    incarnation: int
    changes: int  # the list is complete up to this change
    agents: tuple[AgentSketch, ...]
    since: int = 0  # 0: agents that are not listed are not on the node
    gone: tuple[AgentName, ...] = ()  # on the node at `since`, but no longer
    more: bool = False  # there are more changes after `changes`


@dataclass(frozen=True, slots=True)
class PinAgent(AgentName):
    """Request to the owner to evict this agent last, or like any other."""

    pinned: bool


@dataclass(frozen=True, slots=True)
class PrefetchAgent(AgentAt):
    """Request to the owner to load an agent from disk into memory, or to cancel that."""

    cancel: bool = False
    is_guess: bool = False  # by an order of turns: refused while a turn waits for the node


@dataclass(frozen=True, slots=True)
class DropResident(AgentName):
    """Request to drop an agent's cache from memory; its copy on disk stays."""


@dataclass(frozen=True, slots=True)
class OfferMigration(OfferRequest):
    """Request to the source to make an agent's blocks durable and list them."""

    verify: bool = False  # a copy arrived damaged: verify the stored blocks first


@dataclass(frozen=True, slots=True)
class Offer:
    """Record of the source, a ticket for its blocks, and addresses to fetch them from."""

    manifest: bytes
    ticket: bytes
    addresses: tuple[Address, ...]
    live: bool = False  # a turn is running: the record grows, and a client waits for the rest


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Request to the target to fetch and publish the missing blocks of an offer."""

    migration: MigrationId
    source: NodeName
    offer: Offer
    urgency: Urgency = Urgency.MIGRATION_COPY


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a copy; `blocks_reused` were already on the target."""

    blocks_sent: int
    blocks_reused: int
    bytes_sent: int
    seconds: float


NOTHING_COPIED: Final = Copied(0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class SealAgent(OfferRequest):
    """Request to the source to serve no further turn until the migration is decided."""


@dataclass(frozen=True, slots=True)
class CommitMigration:
    """Request to the target to fetch the tail of the sealed record and own it at `epoch`.

    The target's durable publish is the commit.
    """

    migration: MigrationId
    source: NodeName
    offer: Offer
    epoch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Agent as its new owner sees it, and the tail that was copied."""

    view: AgentView
    copied: Copied


@dataclass(frozen=True, slots=True)
class ReleaseAgent(AgentAt):
    """Notice to the source that `owner` owns the agent at `epoch`; it becomes a replica."""

    migration: MigrationId
    owner: NodeName


@dataclass(frozen=True, slots=True)
class AbortMigration(AgentName):
    """Request to either side to forget a migration; a sealed source serves again."""

    migration: MigrationId


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Request to take no new agents, also after a restart, or to take them again."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Flush:
    """Request to make every agent durable and, with `drop_hot`, free resident caches."""

    drop_hot: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to finish or cancel running turns, make all agents durable, and exit."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Request to let running turns end, save everything, and end the process.

    The process starts again at once, with the code that is installed then.
    """

    wait_s: float  # for running turns


@dataclass(frozen=True, slots=True)
class Done:
    """Reply that reports success only."""

    detail: str = ""
