"""The router's view of its nodes and their agents: leases, owners, sketches, load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fabric.assumed_speeds import DECODE_TOKENS_PER_S
from fabric.control.agent_at import AgentName
from fabric.control.node_calls import READY, AgentView, NodeView
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.limits import BODY_BYTES_MAX, HEARTBEAT_S
from fabric.net.links import LinkKind, LinkView
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.sampling_defaults import SamplingDefault
from router.events import FleetEvents, LinkMeasured, MemoryChanged, NodeChanged, Publish
from router.fleet.agent_activity import AgentActivity, RecentPartners, Sessions
from router.fleet.agent_lists import AgentReports
from router.fleet.directory import Directory, Holding
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.membership import CatchUp, LinkFactory, Member, Membership, Roster
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_discovery import NodeDiscovery
from router.fleet.node_snapshots import NodeSnapshots
from router.fleet.terms import SOLE_ROUTER, TermAuthority
from router.fresh_ids import first_epoch, fresh_epoch_gap
from router.limits import ERASURE_EPOCHS, LINK_RATE_CHANGE_MIN
from router.placement.link_rates import best_by_kind
from router.placement.load_ledger import Booking, Ledger
from router.placement.profiles import Profiles
from router.placement.sketch_index import SketchIndex


class NodeWatch:
    """Last published state of every node, its memory and its links."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._states: dict[NodeName, str] = {}
        self._rates: dict[NodeName, dict[tuple[NodeName, LinkKind], float]] = {}
        self._views: dict[NodeName, NodeView] = {}  # looked at last

    def publish_changes(self, member: Member, state: str) -> None:
        """Publish what has changed since the last call for this node."""
        before = self._states.get(member.name)
        if state != before:
            self._states[member.name] = state
            self._publish(NodeChanged(member.name, state, before))
        view, last = member.view, self._views.get(member.name)
        if view is None or view is last:
            return
        self._views[member.name] = view
        self._publish_memory(view, last)
        if last is None or view.links is not last.links:
            self._publish_links(member.name, view.links)

    def _publish_memory(self, view: NodeView, last_view: NodeView | None) -> None:
        now, last = _memory_of(view), _memory_of(last_view) if last_view is not None else None
        if now != last and not (now.is_usual and (last is None or last.is_usual)):
            self._publish(now)

    def _publish_links(self, name: NodeName, links: tuple[LinkView, ...]) -> None:
        published = self._rates.get(name, {})
        rates = dict[tuple[NodeName, LinkKind], float]()
        for (peer, kind), link in best_by_kind(links).items():
            rate, last = link.bytes_per_s, published.get((peer, kind))
            if rate is None:
                continue
            is_news = last is None or abs(rate - last) > LINK_RATE_CHANGE_MIN * last
            rates[peer, kind] = rate if is_news or last is None else last
            if is_news:
                self._publish(LinkMeasured(name, peer, kind, rate, link.rtt_s))
        self._rates[name] = rates


def _memory_of(view: NodeView) -> MemoryChanged:
    return MemoryChanged(
        view.name, view.memory_pressure, view.hot_limit_bytes, view.hot_total_bytes
    )


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Ways in which a router finds nodes and connects to them, and its clocks for them."""

    roster: Roster
    connect: LinkFactory
    clock: Clock
    heartbeat_s: float = HEARTBEAT_S
    terms: TermAuthority = SOLE_ROUTER
    voters: Mapping[str, NodeLink] = field(default_factory=dict)  # beside the nodes


class Fleet:
    """Nodes of the fabric, with all soft state about them and their agents."""

    def __init__(
        self,
        access: NodeAccess,
        *,
        floor: Callable[[AgentKey], int],
        catch_up: CatchUp,
        alias: Callable[[AgentKey], str],
        expected: ExpectedNodes,
        life: int,
    ) -> None:
        """Build an empty fleet.

        `floor` is the epoch up to which an agent was erased, `alias` the name of an agent in logs,
        which outlive an erasure. `life` counts the starts of this fabric's router; 0 is unknown.
        """
        self.clock = access.clock
        self.urls: list[str] = []  # at which the router listens, once it does
        self.life = life
        self.terms = access.terms
        self.alias = alias
        self.events = FleetEvents(access.clock)
        self.directory = Directory(self.events.publish, floor)
        self.sketches = SketchIndex()
        self.ledger = Ledger()
        self.activity = AgentActivity(access.clock)
        self.partners = RecentPartners()
        self.sessions = Sessions()
        watch = NodeWatch(self.events.publish)

        def note_state(member: Member, state: str) -> None:
            self.nodes.note(member, state)
            if member.view is not None and member.view.router is not None:
                self.terms.note_term(member.view.router)
            watch.publish_changes(member, state)

        self.membership = Membership(
            access.roster,
            access.connect,
            access.clock,
            AgentReports(self.directory, self.sketches),
            catch_up=catch_up,
            watch=note_state,
            heartbeat_s=access.heartbeat_s,
        )
        self.profiles = Profiles(self._view)
        self.nodes = NodeSnapshots(self.membership, self.ledger, self.directory, self.profiles)
        self.discovery = NodeDiscovery(self.membership, access.clock, expected)

    def _view(self, name: NodeName) -> NodeView | None:
        member = self.membership.find(name)
        return member.view if member is not None else None

    def note_progress(self, entry: Booking, prompt_tokens: int, done_tokens: int) -> None:
        """Correct a turn's load, and its node's speeds, by the tokens of its prompt in place."""
        now_s, node = self.clock.monotonic_s(), entry.node
        if entry.open:
            progress = self.profiles.note_progress(node, entry.progress, done_tokens, now_s)
            entry.progress = progress
        view, left_tokens = self._view(node), prompt_tokens - done_tokens
        reported = view.prefill_tokens_per_s if view is not None else 0.0
        position = prompt_tokens - left_tokens / 2
        speed = self.profiles.of(node).prefill_tokens_per_s(reported, position)
        self.ledger.rebook(entry, left_tokens, speed)

    def note_answer(self, entry: Booking, tokens: int) -> None:
        """Learn a node's decode speed from an ended answer, before its booking is closed."""
        if entry.open and entry.progress is not None:
            now_s, batch = self.clock.monotonic_s(), self.ledger.turns(entry.node)
            self.profiles.note_answer(entry.node, entry.progress, tokens, now_s, batch)

    def begin_term(self, term: int) -> None:
        """Become the active router: issue epochs of this term, and await current lists."""
        self.life = term
        self.directory.begin_term()
        self.membership.await_reports()

    def recompute_s(self, node: NodeName, tokens: int) -> float:
        """Estimate how long a node computes the first tokens of a prompt; 0 without a speed."""
        view = self._view(node)
        reported = view.prefill_tokens_per_s if view is not None else 0.0
        speed = self.profiles.of(node).prefill_tokens_per_s(reported, tokens / 2)
        return tokens / speed if speed > 0 else 0.0

    def decode_tokens_per_s(self, node: NodeName) -> float:
        """Return a node's measured speed of all answers, or the assumed one."""
        member = self.membership.find(node)
        measured = member.view.decode_tokens_per_s if member and member.view else 0.0
        return measured or DECODE_TOKENS_PER_S

    def tenant_alias(self, tenant: TenantId) -> str:
        """Return the name of a tenant in traces, which does not reveal its own."""
        return self.alias((tenant, AgentId("")))

    def link(self, name: NodeName) -> NodeLink:
        """Return the link to a known node; raise NodeLostError for others."""
        member = self.membership.find(name)
        if member is None:
            message = f"node {name} is not in the fabric"
            raise NodeLostError(message, name)
        return member.link

    def require_node(self, name: str, param: str = "to") -> NodeName:
        """Return `name` as a node's name; raise NotFoundError if no node has it."""
        if self.membership.find(NodeName(name)) is not None:
            return NodeName(name)
        raise self.discovery.unknown_node(name, param)

    def require_owner(self, key: AgentKey) -> Holding:
        """Return an agent's owner; raise NotFoundError, or RetryLaterError if one may turn up."""
        owner = self.directory.owner(key)
        if owner is None and self.directory.released_owner(key) is not None:
            message = "the outcome of this agent's last move is unknown; its next turn decides it"
            raise ConflictError(message, code="agent_undecided")
        if owner is None:
            raise self.discovery.unknown_agent(key[1])
        return owner

    async def reread_owner(self, key: AgentKey) -> Holding:
        """Return an agent's owner after reading all nodes' lists; raise as `require_owner`."""
        await self.membership.refresh(relist=True)
        return self.require_owner(key)

    async def ask_owner(self, call: AgentName) -> AgentView:
        """Send a call to an agent's owner; raise as `require_owner` and the node do."""
        owner = await self.reread_owner(call.key)
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
        """Record the holding in a node's answer, before the node lists it."""
        holding = Holding(node, epoch, state, self.clock.monotonic_s(), group, view)
        self.directory.note(key, holding)

    def require_accepting(self, name: str, param: str = "to") -> NodeName:
        """Return the node if it takes agents; otherwise raise a FabricError with the reason."""
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
        """Return the epoch at which an agent starts or is taken over; 0: the node's first.

        While a node has not reported its agents, the epoch is above any that it may claim.
        """
        return self._above_unreported(key, self.directory.next_epoch(key))

    def move_epoch(self, key: AgentKey, holding: Holding) -> int:
        """Return the epoch at which a move of `holding` makes its target the owner."""
        return self._above_unreported(key, self.directory.next_move_epoch(key, holding))

    def erasure_epoch(self, key: AgentKey) -> int:
        """Return an epoch above any that a node may claim for the agent; the next starts higher."""
        floor_epoch = self.directory.floor(key) + first_epoch(self.life + 1)
        next_epoch = self.directory.next_epoch(key)
        return (max(next_epoch, floor_epoch) if self.life else next_epoch) + ERASURE_EPOCHS

    def _above_unreported(self, key: AgentKey, epoch: int) -> int:
        """Return `epoch`, or one above any that an unreported owner may claim.

        Earlier routers left gaps, too: each life of the router has a range of epochs above theirs.
        Where routers have terms, all of a term's epochs are in its range, as the router before may
        have issued one last.
        """
        if self.terms is not SOLE_ROUTER:
            epoch = max(epoch, self.directory.floor(key) + first_epoch(self.life))
        if not self.may_have_later_owner(key):
            return epoch
        return max(epoch, self.directory.floor(key) + first_epoch(self.life)) + fresh_epoch_gap()

    def may_have_later_owner(self, key: AgentKey) -> bool:
        """Return whether a node that has not reported may own an agent at a later epoch.

        None can once every node has reported, or if this router gave out the highest known epoch.
        A replica at an epoch above the owner's is the copy of a later owner.
        """
        owner = self.directory.owner(key)
        is_ours = owner is not None and self.directory.has_issued(key, self.directory.highest(key))
        is_complete = (
            self.discovery.has_all_reports() and not self.discovery.expected.may_be_incomplete
        )
        return not (is_ours or is_complete)

    def is_alive(self, name: NodeName) -> bool:
        """Return whether a node answered within SUSPECT_S."""
        return self.membership.is_alive(name)

    def is_up(self, name: NodeName) -> bool:
        """Return whether a node's lease has not expired."""
        return self.membership.is_up(name)

    def ready(self) -> list[NodeView]:
        """Return the nodes that take new agents: alive and not draining."""
        views = (m.view for m in self.membership.members if self.is_alive(m.name))
        return [view for view in views if view is not None and view.state == READY]

    def models(self) -> list[str]:
        """Return the names of the models that unexpired nodes serve."""
        return self.membership.models()

    def context_tokens_max(self, model: str) -> int | None:
        """Return the smallest context of the unexpired nodes with a model; None: there are none.

        An agent may be moved to any of them.
        """
        views = (m.view for m in self.membership.members if self.is_up(m.name))
        contexts = (view.context_tokens_max for view in views if view and view.model == model)
        return min(contexts, default=None)

    def sampling_defaults(self, node: NodeName) -> tuple[SamplingDefault, ...]:
        """Return a node's sampling of requests that leave fields out."""
        member = self.membership.find(node)
        return (member.view.sampling or ()) if member and member.view else ()

    def prompt_bytes_max(self) -> int:
        """Return the size of text in bytes above which it fits no node's context.

        Lost nodes may return, and nodes that have not joined may serve any model.
        """
        if self.discovery.is_gathering() or not self.membership.has_contacted_all():
            return BODY_BYTES_MAX
        views = (member.view for member in self.membership.members)
        return max((view.prompt_bytes_max for view in views if view), default=BODY_BYTES_MAX)
