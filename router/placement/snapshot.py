"""Snapshot of the fleet for one turn or agent: all that a decision reads.

Only `router.fleet.snapshots` takes snapshots, from the nodes' last reports and from what this
router has given them since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fabric.assumed_speeds import DISK_BYTES_PER_S
from fabric.control.node_calls import (
    DRAINING,
    PRESSURES,
    READY,
    THERMAL_STATES,
    AgentView,
    NodeView,
)
from fabric.ids import AgentId, NodeName
from router.placement.profiles import UNKNOWN, NodeProfile
from router.placement.sketch_index import HeadState

HEAT_FACTORS: Final = dict(zip(THERMAL_STATES, (1.0, 1.0, 1.5, 4.0), strict=True))
PRESSURE_FACTORS: Final = dict(zip(PRESSURES, (1.0, 1.25, 3.0), strict=True))


class HolderRole(StrEnum):
    """Role of a node for one agent."""

    STARTING = "starting"  # its first turn was sent there
    OWNER = "owner"
    RELEASED = "released"  # the last owner, while the owner is unknown
    COPY = "copy"  # a replica, or a claim that a later one overrides
    ERASED = "erased"  # was erased, but not removed yet


@dataclass(frozen=True, slots=True)
class AgentHolder:
    """Node that has an agent, or is about to."""

    node: NodeName
    role: HolderRole
    view: AgentView | None = None  # missing until the node lists it


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """Node that has a prefix of a prompt cached."""

    node: NodeName
    share: float  # of the prompt's text
    agent: AgentId | None = None  # whose whole conversation the prompt continues
    group: str | None = None  # of that agent
    is_replica: bool = False
    is_resident: bool = False  # the agent is in the node's memory, not only on disk
    state: HeadState = HeadState.STORED


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Node with its last report, its lease, and its load since."""

    view: NodeView
    is_alive: bool = True  # answered within SUSPECT_S
    is_up: bool = True  # its lease has not expired
    is_returning: bool = False  # was lost, and is starting again
    promised_s: float = 0.0  # unfinished prefill of this router's turns
    prompts_s: tuple[float, ...] = ()  # the same by prompt, as far as they are known
    others_end_s: float = 0.0  # when prefill that others gave the node will have ended
    turns: int = 0  # running
    agents: int = 0  # on the node, including those just given to it
    turn_order: int = 0  # the higher, the later it was given any turn
    cold_order: int = 0  # the same for turns with nothing cached
    coming_bytes: int = 0  # of agents that are being transferred to it
    leaving_bytes: int = 0  # of agents and beginnings that are being transferred from it
    profile: NodeProfile = UNKNOWN  # as turns have shown it

    @property
    def name(self) -> NodeName:
        return self.view.name

    def queue_s(self, now_s: float) -> float:
        """Return the seconds of prefill before a turn that is sent now."""
        return self.promised_s + max(0.0, self.others_end_s - now_s)

    def prefill_tokens_per_s(self, position: float = 0.0) -> float:
        """Return the speed of prompts at a position; 0 if unknown."""
        return self.profile.prefill_tokens_per_s(self.view.prefill_tokens_per_s, position)

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed of one sequence alone, as it follows from batches like the next; 0 if unknown."""
        return self.profile.decode_tokens_per_s(self.view.decode_tokens_per_s, self.turns + 1)

    @property
    def disk_bytes_per_s(self) -> float:
        """Speed at which caches are read from its disk."""
        return self.view.restore_bytes_per_s or DISK_BYTES_PER_S

    @property
    def slowness(self) -> float:
        """Factor on all work there: a hot machine slows down, and one without memory swaps."""
        view = self.view
        heat = HEAT_FACTORS.get(view.thermal_state, 1.0)
        return heat * PRESSURE_FACTORS.get(view.memory_pressure, 1.0)

    def evicted_bytes(self, tokens: float) -> float:
        """Return the bytes of idle caches that `tokens` more tokens evict from memory."""
        if self.view.free is None:
            return 0.0
        free_bytes = self.view.free.hot - self.coming_bytes
        return max(0.0, tokens * self.view.bytes_per_token - max(0, free_bytes))

    @property
    def held_tokens(self) -> int:
        """Tokens of agents on the node, or on their way to it."""
        return self.view.tokens + self.coming_bytes // max(1, self.view.bytes_per_token)

    @property
    def is_ready(self) -> bool:
        """Whether the node takes new agents."""
        return self.is_alive and self.view.state == READY

    @property
    def is_draining(self) -> bool:
        """Whether the node's agents are moved away, and no new ones arrive."""
        return self.is_alive and self.view.state == DRAINING


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """Figures over all ready nodes of a model, on which the cost of each depends."""

    prefill_mean: float  # of the measured speeds
    prefill_median: float
    decode_mean: float
    agents: float
    weights: float
    is_calm: bool = True  # no turn runs on any of them


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Nodes that have reported, and what they have of one agent or prompt."""

    nodes: Mapping[NodeName, NodeSnapshot]  # all, or those that may be chosen
    holders: tuple[AgentHolder, ...] = ()  # the serving node first, then the latest copies
    prefixes: Sequence[PrefixHolder] = ()  # the longest first
    group_nodes: tuple[NodeName, ...] = ()  # owners of other conversations of the group
    totals: FleetTotals | None = None  # where `nodes` are not all
    home: NodeName | None = None  # likewise: the node of conversations without any trace
    now_s: float = 0.0  # by the router's clock
    agent: AgentId | None = None  # that the turn names or continues
    is_idle: bool = False  # the agent: it has no running turn, and placement may move it
    moved_lately: bool = False  # whether placement moved the agent recently
    move_price: float = 1.0  # factor; the higher, the more moves there were in the last turns

    @property
    def owner(self) -> AgentHolder | None:
        return next((h for h in self.holders if h.role is HolderRole.OWNER), None)
