"""All that the router knows of its nodes, in one place: leases, owners, sketches, load."""

from collections.abc import Callable

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import READY, AgentList, AgentView, NodeView
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.limits import BODY_BYTES_MAX, HEARTBEAT_S
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from router.events.bus import FleetEvents
from router.fleet.directory import Directory, Holding
from router.fleet.membership import LinkFactory, Membership, Roster
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_discovery import NodeDiscovery
from router.fleet.node_watch import NodeWatch
from router.fresh_ids import first_epoch, fresh_epoch_gap
from router.limits import ERASURE_EPOCHS
from router.placement.load_ledger import Ledger
from router.placement.sketch_index import SketchIndex


class Fleet:
    """The nodes, and everything soft that is remembered of them."""

    def __init__(
        self,
        roster: Roster,
        connect: LinkFactory,
        clock: Clock,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.clock = clock
        self.life = 0  # how often this fabric's router was started; 0: unknown
        # What logs call an agent: they outlive an erasure, and names may be addresses of people.
        self.alias: Callable[[AgentKey], str] = lambda _: "?"
        self.events = FleetEvents(clock)
        self.directory = Directory(self.events.publish)
        self.sketches = SketchIndex()
        self.ledger = Ledger()
        self.membership = Membership(roster, connect, clock, self, heartbeat_s)
        self.membership.watch = NodeWatch(self.membership, self.events.publish).look
        self.discovery = NodeDiscovery(self.membership, clock)

    def on_list(self, agents: AgentList, asked_s: float) -> None:
        """Feed a node's agents to the directory and the sketches."""
        for tenant, agent in self.directory.apply(agents, asked_s):
            self.sketches.remove(tenant, agents.node, agent)
        for item in agents.agents:
            view = item.view
            tag = (agents.incarnation, view.epoch, view.revision)
            if view.epoch <= self.directory.floor(view.key):
                continue  # erased, and not gone yet: no conversation goes on with it
            if item.sketch:  # none yet: its first turn runs, and was sketched when it was sent
                self.sketches.put(view.tenant, agents.node, view.agent, item.sketch, tag)

    def doubts(self, node: NodeName) -> bool:
        """Say whether a node's whole list is wanted."""
        return self.directory.doubts(node)

    def on_restart(self, node: NodeName) -> None:
        """Expect a node's change counter to start anew."""
        self.directory.restart(node)

    def link(self, name: NodeName) -> NodeLink:
        """Return the link to a known node; raise NodeLostError for others."""
        member = self.membership.find(name)
        if member is None:
            message = f"node {name} is not in the fabric"
            raise NodeLostError(message, name)
        return member.link

    def require_node(self, name: str, param: str = "to") -> NodeName:
        """Return `name` as a node's; raise NotFoundError that tells the known ones."""
        if any(member.name == name for member in self.membership.members):
            return NodeName(name)
        raise self.discovery.unknown_node(name, param)

    def require_owner(self, key: AgentKey) -> Holding:
        """Return who owns an agent; raise NotFoundError, or RetryLaterError if one may turn up."""
        owner = self.directory.owner(key)
        if owner is None and self.directory.released_owner(key) is not None:
            message = "nobody could say how a move of this agent ended; its next turn decides that"
            raise ConflictError(message, code="agent_undecided")
        if owner is None:
            raise self.discovery.unknown_agent(key[1])
        return owner

    async def heard_owner(self, key: AgentKey) -> Holding:
        """Return who owns an agent once the nodes have told theirs; raise as `require_owner`."""
        await self.membership.refresh(relist=True)
        return self.require_owner(key)

    async def ask_owner(self, call: AgentName) -> AgentView:
        """Have an agent's owner carry out a call; raise as `require_owner` and the node do."""
        owner = await self.heard_owner(call.key)
        return await self.link(owner.node).call(call, AgentView)

    def note_holding(
        self,
        key: AgentKey,
        node: NodeName,
        epoch: int,
        state: OwnerState,
        group: str | None = None,
        view: AgentView | None = None,
    ) -> None:
        """Note what a node's answer says that it holds, before it lists it."""
        holding = Holding(node, epoch, state, self.clock.monotonic_s(), group, view)
        self.directory.note(key, holding)

    def require_taking(self, name: str, param: str = "to") -> NodeName:
        """Return a node that takes agents; raise a FabricError that says why another does not."""
        node = self.require_node(name, param)
        member = self.membership.find(node)
        if not self.is_alive(node) or not member or not member.view:
            message = f"node {node} is not answering"
            raise RetryLaterError(message, retry_after_s=2.0, code=NodeLostError.code)
        if member.view.state != READY:
            message = f"node {node} is {member.view.state}: it takes no agents"
            raise ConflictError(message, code="node_draining", param=param)
        return node

    def begin_epoch(self, key: AgentKey) -> int:
        """Return the epoch at which an agent is begun here, or taken over; 0: its node's first.

        Where a node has not told its agents yet, it leaps over what an owner there may claim.
        """
        return self._above_unreported(key, self.directory.next_epoch(key))

    def move_epoch(self, key: AgentKey, holding: Holding) -> int:
        """Return the epoch at which a move of `holding` makes its target the owner."""
        return self._above_unreported(key, self.directory.next_move_epoch(key, holding))

    def erasure_epoch(self, key: AgentKey) -> int:
        """Return an epoch above whatever may turn up of an agent; the next one begins higher."""
        floor_epoch = self.directory.floor(key) + first_epoch(self.life + 1)
        known = self.directory.next_epoch(key)
        return (max(known, floor_epoch) if self.life else known) + ERASURE_EPOCHS

    def _above_unreported(self, key: AgentKey, epoch: int) -> int:
        """Return `epoch`, or one above any that an owner which no node has reported may claim.

        Earlier routers leapt, too: each life of the router has a range of epochs above theirs.
        """
        if not self.may_have_later_owner(key):
            return epoch
        return max(epoch, self.directory.floor(key) + first_epoch(self.life)) + fresh_epoch_gap()

    def may_have_later_owner(self, key: AgentKey) -> bool:
        """Say whether a node that was not heard yet may own an agent above what is known.

        None can once every node has told, nor where this router gave out the highest epoch known.
        A replica at an epoch above the owner's is the copy of a later owner.
        """
        owner = self.directory.owner(key)
        is_ours = owner is not None and self.directory.is_own(key, self.directory.highest(key))
        is_whole = (
            self.discovery.has_all_reports() and not self.discovery.expected.may_be_incomplete
        )
        return not (is_ours or is_whole)

    def is_alive(self, name: NodeName) -> bool:
        """Say whether a node was heard in its last moments."""
        return self.membership.is_alive(name)

    def is_up(self, name: NodeName) -> bool:
        """Say whether a node's lease has not run out."""
        return self.membership.is_up(name)

    def ready(self) -> list[NodeView]:
        """Return the nodes that take new agents: alive and not draining."""
        views = (m.view for m in self.membership.members if self.is_alive(m.name))
        return [view for view in views if view is not None and view.state == READY]

    def models(self) -> list[str]:
        """Return the names of the models that unexpired nodes serve."""
        views = (m.view for m in self.membership.members if self.is_up(m.name))
        return sorted({view.model for view in views if view is not None})

    def prompt_bytes_max(self) -> int:
        """Return how many bytes of text no node's context holds, of whatever model.

        Nodes that were lost may come back, and those that are to come may serve any model.
        """
        if self.discovery.is_gathering() or not self.membership.has_contacted_all():
            return BODY_BYTES_MAX
        views = (member.view for member in self.membership.members)
        return max((view.prompt_bytes_max for view in views if view), default=BODY_BYTES_MAX)
