"""The router of a simulated fabric: the shipped objects, and nodes that they reach at once.

The simulator makes the router's own calls (heartbeats, lists, targets, bookings) at the moments at
which the router makes them. No call of a modelled node waits, so no event loop is needed.
"""

from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar, cast

from fabric.control.node_calls import Describe, ListAgents, NodeView
from fabric.errors import FabricError, RejectedError
from fabric.ids import NodeName
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.fleet import Fleet, NodeAccess
from router.fleet.node_client import ControlTransport, NodeLink, NodeLostError
from router.placement.placement import Placement
from router.simulate.machine import Machine
from router.simulate.timeline import Timeline
from router.telemetry import Telemetry
from router.turns.targets import Targets

T = TypeVar("T")
ROUTER_LIFE: Final = 1


class MachineLink:
    """Link of the router to a modelled node."""

    def __init__(self, machine: Machine) -> None:
        self.name = machine.name
        self.http_url = ""
        self.reads_origins = False
        self._machine = machine

    async def call(self, message: object, kind: type[T], timeout_s: float | None = None) -> T:
        """Answer a heartbeat or a request for the list of agents."""
        if not self._machine.is_up:
            text = f"{self.name} is down"
            raise NodeLostError(text, self.name)
        if isinstance(message, Describe):
            return cast("T", self._machine.view())
        if isinstance(message, ListAgents):
            return cast("T", self._machine.list_agents(message))
        # Answer like a node older than the call: the router then makes the plain one.
        text = f"a modelled node does not handle {type(message).__name__}"
        raise RejectedError(text, code="unknown_call")


class _NothingErased:
    """Catch-up of joining nodes when nothing was erased."""

    def is_caught_up(self, view: NodeView) -> bool:
        return True

    async def catch_up(
        self, link: NodeLink, view: NodeView, others: object, *, is_present: bool
    ) -> None:
        """Return at once."""


def run_now(call: Coroutine[Any, Any, T]) -> T:
    """Run a call that waits for nothing, but may give way to others; return its result."""
    try:
        while call.send(None) is None:
            pass
    except StopIteration as ended:
        return cast("T", ended.value)
    call.close()
    message = "a call of the simulated router waits"
    raise AssertionError(message)


class RouterSide:
    """Fleet and targets of the shipped router, with one placement."""

    def __init__(
        self,
        timeline: Timeline,
        machines: Mapping[NodeName, Machine],
        placement: Placement,
        *,
        moves_agents: bool = True,
    ) -> None:
        self._timeline = timeline
        self._links = {name: MachineLink(machine) for name, machine in machines.items()}
        access = NodeAccess(self._roster, self._connect, timeline)
        self.fleet = Fleet(
            access,
            floor=lambda _: 0,
            catch_up=_NothingErased(),
            alias=lambda key: key[1],
            expected=ExpectedNodes(),
            life=ROUTER_LIFE,
        )
        self.targets = Targets(self.fleet, placement, Telemetry(), moves_agents=moves_agents)
        run_now(self.fleet.membership.discover())

    async def _roster(self) -> Mapping[NodeName, ControlTransport]:
        return dict.fromkeys(self._links, _unused)

    def _connect(self, name: NodeName, _transport: object, _is_lost: object) -> NodeLink:
        return cast("NodeLink", self._links[name])

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every node, and read the lists that have changed."""
        membership = self.fleet.membership
        for name in self._links:
            self.refresh(name)
        membership.has_all_reports()

    def refresh(self, name: NodeName) -> None:
        """Send a heartbeat to one node, and read its list if it has changed."""
        member = self.fleet.membership.find(name)
        if member is not None:
            run_now(self.fleet.membership.heartbeat(member))


async def _unused(raw: bytes) -> bytes:
    """Stand in for a transport, which a link to a modelled node does not use."""
    message = f"the simulator sends no {len(raw)} bytes"
    raise FabricError(message, code="not_simulated")
