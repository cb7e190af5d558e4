"""Load that this router has given to nodes: exact for its own turns, and newer than heartbeats.

Many turns arrive between two heartbeats; without the ledger, all would go to the same idle node,
and all agents of a draining node to the same empty one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.ids import NodeName
from router.placement import seconds
from router.placement.decision import Decision, Ship
from router.placement.profiles import PromptProgress


@dataclass(slots=True)
class Booking:
    """Share of a running turn in a node's load."""

    node: NodeName
    prefill_s: float
    open: bool = field(default=True, repr=False)
    progress: PromptProgress | None = None  # as its node reported it last


@dataclass(slots=True)
class OwnLoad:
    """Most of a node's load that can be this router's, at any moment since a report of the node."""

    turns: int = 0
    prefill_s: float = 0.0


class Ledger:
    """Prefill, turns and transfers given to each node, and the order of its last turns."""

    def __init__(self) -> None:
        self._prompts: dict[NodeName, dict[int, Booking]] = {}  # unfinished, by node
        self._turns: Counter[NodeName] = Counter()
        self._since_report: dict[NodeName, OwnLoad] = {}
        self._coming_bytes: Counter[NodeName] = Counter()
        self._leaving_bytes: Counter[NodeName] = Counter()
        self._last: dict[NodeName, int] = {}
        self._last_cold: dict[NodeName, int] = {}
        self._count = 0
        self.changed: set[NodeName] = set()  # nodes whose load changed, for the keeper of snapshots

    def begin(self, node: NodeName, prefill_s: float, *, cold: bool) -> Booking:
        """Book a turn; its prefill counts until `end_prefill`."""
        self._turns[node] += 1
        own_load = self._since_report.setdefault(node, OwnLoad())
        own_load.turns += 1
        own_load.prefill_s += prefill_s
        self.changed.add(node)
        self._count += 1  # a counter, so that two turns in one clock tick have an order
        self._last[node] = self._count
        if cold:
            self._last_cold[node] = self._count
        entry = Booking(node, prefill_s)
        if prefill_s > 0:
            self._prompts.setdefault(node, {})[id(entry)] = entry
        return entry

    def rebook(self, entry: Booking, left_tokens: int, tokens_per_s: float) -> None:
        """Correct the prefill that is left of a running turn; a speed of 0 is unknown."""
        if not entry.open:
            return
        prefill_s = seconds.prefill_s(left_tokens, tokens_per_s or PREFILL_TOKENS_PER_S)
        own_load = self._since_report.setdefault(entry.node, OwnLoad())
        own_load.prefill_s += max(0.0, prefill_s - entry.prefill_s)
        entry.prefill_s = prefill_s
        of_node = self._prompts.setdefault(entry.node, {})
        if prefill_s > 0:
            of_node[id(entry)] = entry
        else:
            of_node.pop(id(entry), None)
        self.changed.add(entry.node)

    def end_prefill(self, entry: Booking) -> None:
        """Remove a turn's prefill from its node's load."""
        self.rebook(entry, 0, 0.0)

    def end(self, entry: Booking) -> None:
        """Close a booking; closing twice is no error."""
        if entry.open:
            self.end_prefill(entry)
            entry.open = False
            self._turns[entry.node] -= 1

    @contextmanager
    def shipping(self, ship: Ship) -> Iterator[None]:
        """Count an agent's bytes at both ends while they are being transferred."""
        self._coming_bytes[ship.target] += ship.missing_bytes
        self.changed.add(ship.target)
        try:
            with self.lending(ship.source, ship.missing_bytes):
                yield
        finally:
            self._coming_bytes[ship.target] -= ship.missing_bytes
            self.changed.add(ship.target)

    @contextmanager
    def lending(self, source: NodeName, size_bytes: int) -> Iterator[None]:
        """Count bytes that leave a node, while they do."""
        self._leaving_bytes[source] += size_bytes
        self.changed.add(source)
        try:
            yield
        finally:
            self._leaving_bytes[source] -= size_bytes
            self.changed.add(source)

    def fetching(self, decision: Decision | None) -> AbstractContextManager[None]:
        """Count what another node sends for a turn, while the turn waits for it."""
        if decision is None or decision.loan is None:
            return nullcontext()
        return self.lending(decision.loan.source, decision.carried_bytes)

    def leaving_bytes(self, node: NodeName) -> int:
        """Return the bytes that are being transferred from the node."""
        return self._leaving_bytes[node]

    def coming_bytes(self, node: NodeName) -> int:
        """Return the bytes of agents that are being transferred to the node."""
        return self._coming_bytes[node]

    def prefill_s(self, node: NodeName) -> float:
        """Return the seconds of unfinished prefill given to the node."""
        return sum(self.prompts_s(node))

    def prompts_s(self, node: NodeName) -> tuple[float, ...]:
        """Return the seconds that are left of each unfinished prompt of the node."""
        return tuple(entry.prefill_s for entry in self._prompts.get(node, {}).values())

    def take_own_load(self, node: NodeName) -> OwnLoad:
        """Return the router's part of the load in a node's new report; count anew from now on.

        Turns that have ended since the report before are in it, as the node may have sent it before
        they ended.
        """
        own_load = self._since_report.get(node, OwnLoad())
        self._since_report[node] = OwnLoad(self.turns(node), self.prefill_s(node))
        return own_load

    def turns(self, node: NodeName) -> int:
        return self._turns[node]

    def turn_order(self, node: NodeName) -> int:
        """Return a number that is higher the later the node got a turn; 0 if never."""
        return self._last.get(node, 0)

    def cold_order(self, node: NodeName) -> int:
        """Return the same for turns that had nothing cached."""
        return self._last_cold.get(node, 0)
