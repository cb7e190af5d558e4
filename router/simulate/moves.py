"""Links between modelled nodes, and moves of agents: copied, then owned by the target."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet import snapshots
from router.fleet.fleet import Fleet
from router.limits import DRAIN_AT_ONCE_MAX, DRAIN_ROUND_PAUSE_S
from router.placement.agent_moves import destination
from router.placement.decision import Ship
from router.simulate.fleet_file import NodeModel
from router.simulate.machine import Machine
from router.simulate.node_cache import KeptAgent
from router.simulate.timeline import Timeline

START_S: Final = 0.03  # of a transfer: offer, ticket, first bytes
LINE_SHARE: Final = 0.8  # of its nominal rate that a link reaches
BYTES_PER_MBIT: Final = 125_000
COMMIT_S: Final = 0.1  # SEAL, COMMIT and the durable record


class Network:
    """Transfers over the interfaces of nodes."""

    def __init__(self, timeline: Timeline, nodes: Mapping[NodeName, NodeModel]) -> None:
        self.slowness = 1.0  # factor on the time of all transfers
        self.sent_bytes = 0
        self._timeline = timeline
        self._rates = {name: node.link_mbit * BYTES_PER_MBIT for name, node in nodes.items()}
        self._free_s = dict.fromkeys(nodes, 0.0)

    def rate(self, source: NodeName, target: NodeName) -> float:
        """Return the bytes per second between two nodes."""
        return LINE_SHARE * min(self._rates[source], self._rates[target]) / self.slowness

    def wait_s(self, source: NodeName, target: NodeName) -> float:
        """Return the seconds until both interfaces are free."""
        return max(0.0, max(self._free_s[source], self._free_s[target]) - self._timeline.now_s)

    def send(
        self, source: NodeName, target: NodeName, size_bytes: int, then: Callable[[], None]
    ) -> float:
        """Carry bytes after the transfers before them; return when they have arrived."""
        began_s = self._timeline.now_s + self.wait_s(source, target)
        ended_s = began_s + START_S + size_bytes / self.rate(source, target)
        self._free_s[source] = self._free_s[target] = ended_s
        self.sent_bytes += size_bytes
        self._timeline.at(ended_s, then)
        return ended_s


class SimulatedMoves:
    """Moves in progress, and the drains that need them."""

    def __init__(
        self,
        timeline: Timeline,
        fleet: Fleet,
        machines: Mapping[NodeName, Machine],
        network: Network,
        is_running: Callable[[AgentKey], bool],
    ) -> None:
        """Start with none; agents whose turn `is_running` are not moved."""
        self.count = 0
        self._timeline = timeline
        self._fleet = fleet
        self._machines = machines
        self._network = network
        self._is_running = is_running
        self._moving: dict[AgentKey, list[Callable[[], None]]] = {}

    def is_moving(self, key: AgentKey) -> bool:
        return key in self._moving

    def call_after_move(self, key: AgentKey, action: Callable[[], None]) -> None:
        """Call `action` after the agent's move."""
        self._moving[key].append(action)

    def drain(self, node: NodeName) -> None:
        """Move a draining node's agents away, a few at a time, until none is left."""
        machine = self._machines[node]
        if not machine.is_draining or not machine.is_up:
            return
        remaining = self._fleet.directory.agents_of_node(node)
        for key in remaining:
            if len(self._moving) >= DRAIN_AT_ONCE_MAX:
                break
            if not self.is_moving(key) and not self._is_running(key):
                ship = destination(snapshots.of_agent(self._fleet, key))
                if ship is not None:
                    self.move(key, ship, lambda: self.drain(node))
        if remaining and not self._moving:
            self._timeline.after(DRAIN_ROUND_PAUSE_S, self.drain, node)

    def move(self, key: AgentKey, ship: Ship, then: Callable[[], None]) -> None:
        """Copy an agent and make the target its owner; call `then` in any case."""
        source, target = self._machines[ship.source], self._machines[ship.target]
        record = source.cache.agents.get(key[1])
        holding = self._fleet.directory.holding(key, ship.source)
        if record is None or holding is None:
            self._timeline.after(0.0, then)
            return
        epoch = self._fleet.move_epoch(key, holding)
        self._fleet.directory.promise(key, epoch)
        booked = ExitStack()
        booked.enter_context(self._fleet.ledger.shipping(ship))
        self._moving[key] = []
        missing_tokens = target.cache.missing_tokens(record.extent.pieces, record.extent)
        size_bytes = missing_tokens * target.cache.bytes_per_token

        def arrived() -> None:
            self._timeline.after(COMMIT_S, committed)

        def committed() -> None:
            booked.close()
            if source.is_up and target.is_up:
                self._commit(key, replace(record, epoch=epoch), source, target)
            for action in (*self._moving.pop(key), then):
                self._timeline.after(0.0, action)

        self._network.send(ship.source, ship.target, size_bytes, arrived)

    def _commit(self, key: AgentKey, record: KeptAgent, source: Machine, target: Machine) -> None:
        self.count += 1
        target.keep(record, is_hot=False)
        source.release(key[1])
        self._fleet.note_holding(key, target.name, record.epoch, OwnerState.OWNED)
        self._fleet.note_holding(key, source.name, record.epoch, OwnerState.REPLICA)
