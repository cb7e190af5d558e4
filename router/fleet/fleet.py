"""All that the router knows of its nodes, in one place: leases, owners, sketches, load."""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from xxhash import xxh3_64

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.control.node_calls import AgentList, AgentView, NodeView
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import AgentId, AgentKey, NodeName
from fabric.limits import BLOCK_TOKENS, BODY_BYTES_MAX, HEARTBEAT_S
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.turn.generation import IdentityKind
from router.fleet.directory import Directory, Holding
from router.fleet.meeting import Meeting
from router.fleet.membership import LinkFactory, Membership, Roster
from router.fleet.node_client import NodeLink, NodeLostError
from router.fresh_ids import fresh_leap
from router.placement.cost import load_s, prefill_s
from router.placement.load_ledger import Ledger
from router.placement.seconds import (
    Job,
    NodeCandidate,
    Policy,
    assumed_rates,
    place,
    with_shares,
)
from router.placement.sketch_index import Match, SketchIndex
from router.turn_request import TurnRequest

READY = "ready"
DRAINING = "draining"  # as a node calls itself


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """The node chosen for a turn, the prefill expected there, and whether it holds a part."""

    node: NodeName
    prefill_s: float
    cached: bool


class Fleet:
    """The nodes, and everything soft that is remembered of them."""

    def __init__(
        self,
        roster: Roster,
        connect: LinkFactory,
        clock: Clock,
        policy: Policy = Policy.SECONDS,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.clock = clock
        # What logs call an agent: they outlive an erasure, and names may be addresses of people.
        self.alias: Callable[[AgentKey], str] = lambda _: "?"
        self.policy = policy
        self.directory = Directory()
        self.sketches = SketchIndex()
        self.ledger = Ledger()
        self.membership = Membership(roster, connect, clock, self, heartbeat_s)
        self.meeting = Meeting(self.membership, clock)

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
            raise NodeLostError(message)
        return member.link

    def require_node(self, name: str, param: str = "to") -> NodeName:
        """Return `name` as a node's; raise NotFoundError that tells the known ones."""
        if any(member.name == name for member in self.membership.members):
            return NodeName(name)
        raise self.meeting.unknown_node(name, param)

    def require_owner(self, key: AgentKey) -> Holding:
        """Return who owns an agent; raise NotFoundError, or RetryLaterError if one may turn up."""
        owner = self.directory.owner(key)
        if owner is None and self.directory.stepped_down(key) is not None:
            message = "nobody could say how a move of this agent ended; its next turn decides that"
            raise ConflictError(message, code="agent_undecided")
        if owner is None:
            raise self.meeting.unknown_agent(key[1])
        return owner

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
        epoch = self.directory.next_epoch(key)
        if self.directory.owner(key) is None and not self.meeting.has_heard_all():
            epoch += fresh_leap()
        return epoch

    def is_alive(self, name: NodeName) -> bool:
        """Say whether a node was heard in its last moments."""
        return self.membership.is_alive(name)

    def is_up(self, name: NodeName) -> bool:
        """Say whether a node's lease has not run out."""
        return self.membership.is_up(name)

    def ready(self) -> list[NodeView]:
        """Return the nodes that take new agents: alive and not draining."""
        return [view for view in self._alive() if view.state == READY]

    def _alive(self) -> list[NodeView]:
        """Return the nodes that answer."""
        return [
            member.view
            for member in self.membership.members
            if member.view is not None and self.is_alive(member.name)
        ]

    def models(self) -> list[str]:
        """Return the names of the models that unexpired nodes serve."""
        views = (m.view for m in self.membership.members if self.is_up(m.name))
        return sorted({view.model for view in views if view is not None})

    def prompt_bytes_max(self) -> int:
        """Return how many bytes of text no node's context holds, of whatever model.

        Nodes that were lost may come back, and those that are to come may serve any model.
        """
        if self.meeting.is_gathering() or not self.membership.has_met_all():
            return BODY_BYTES_MAX
        views = (member.view for member in self.membership.members)
        return max((view.prompt_bytes_max for view in views if view), default=BODY_BYTES_MAX)

    def place(
        self, turn: TurnRequest, without: Container[NodeName], home: NodeName | None
    ) -> PlacedTurn:
        """Choose a node for a turn that no owner must serve; raise if there is none.

        A named agent's `home` serves it while it drains, too: its memory leaves that node with
        the agent, as soon as that is owned again.
        """
        # Any other turn's home is a habit, and not a copy of the agent.
        kept = home if turn.identity.kind is IdentityKind.AGENT else None
        views = [
            view
            for view in self._alive()
            if (view.state == READY or (view.state == DRAINING and view.name == kept))
            and view.model == turn.model
            and view.name not in without
        ]
        if not views:
            message = "no node is ready to serve this model"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        matches = self._matches(turn)
        job = Job(turn.prompt.tokens_estimate, turn.sampling.max_tokens, home)
        rates = zip(
            assumed_rates([view.prefill_tokens_per_s for view in views], PREFILL_TOKENS_PER_S),
            assumed_rates([view.decode_tokens_per_s for view in views], 0.0),
            strict=True,
        )
        found = [
            replace(
                self._candidate(turn, view, matches.get(view.name)),
                prefill_tokens_per_s=prefill,
                decode_tokens_per_s=decode,
            )
            for view, (prefill, decode) in zip(views, rates, strict=True)
        ]
        nodes = with_shares(found, kept)
        chosen = place(job, nodes, self.policy)
        missing_tokens = job.prompt_tokens - chosen.cached_tokens
        expected_s = prefill_s(missing_tokens, chosen.prefill_tokens_per_s)
        return PlacedTurn(chosen.name, expected_s, chosen.cached_tokens > 0)

    def recompute_s(self, turn: TurnRequest, without: NodeName) -> float:
        """Estimate the prefill of a whole prompt on the fastest of the other nodes."""
        rates = [v.prefill_tokens_per_s for v in self.ready() if v.name != without]
        return prefill_s(turn.prompt.tokens_estimate, max(rates)) if any(rates) else math.inf

    def continued(self, turn: TurnRequest, without: Container[NodeName] = ()) -> NodeName | None:
        """Say where the conversation lives that an unnamed turn continues, if any is known."""
        if self.policy is not Policy.SECONDS:  # the baselines place every unnamed turn
            return None
        matches = self._matches(turn)
        found = [
            (match.pieces_count, node)
            for node, match in matches.items()
            if match.continued and not self._is_replica((turn.tenant, match.continued), node)
        ]
        for _, node in sorted(found, reverse=True):
            if node not in without and self.is_up(node):
                return node
        return None

    def home(self, turn: TurnRequest, without: Container[NodeName] = ()) -> NodeName | None:
        """Say where an unnamed conversation that nobody seems to hold should rather go."""
        group = turn.identity.agent
        matches = self._matches(turn)
        continued = [
            (match.pieces_count, node)
            for node, match in matches.items()
            if match.continued and self._in_group((turn.tenant, match.continued), node, group)
        ]
        for _, node in sorted(continued, reverse=True):
            if node not in without and self.is_up(node):
                return node
        owners = self.directory.group_owners(turn.tenant, group) if group else []
        for owner in owners:
            if owner.node not in without and self.is_up(owner.node):
                return owner.node
        return self._hashed_home(turn, without)

    def _hashed_home(self, turn: TurnRequest, without: Container[NodeName]) -> NodeName | None:
        # Prompts below one sketch piece leave no trace: their opening picks the node.
        names = [v.name for v in self.ready() if v.model == turn.model and v.name not in without]
        seed = f"{turn.tenant}:{turn.identity.agent or turn.prompt.opening}"
        return max(names, key=lambda name: _weight(f"{seed}:{name}"), default=None)

    def _candidate(self, turn: TurnRequest, view: NodeView, match: Match | None) -> NodeCandidate:
        cached = 0
        from_disk_s = 0.0
        if match is not None:
            share = match.pieces_count / len(turn.prompt.sketch)
            cached = round(share * turn.prompt.tokens_estimate)
            is_named = turn.identity.kind is IdentityKind.AGENT
            own = turn.identity.agent if is_named else match.continued
            if match.continued is None or match.continued != own:
                cached -= cached % BLOCK_TOKENS  # others' caches are shared by whole blocks
            if match.continued and not self._is_hot((turn.tenant, match.continued), view.name):
                from_disk_s = load_s(cached * view.bytes_per_token)
        return NodeCandidate(
            name=view.name,
            prefill_tokens_per_s=view.prefill_tokens_per_s,
            decode_tokens_per_s=view.decode_tokens_per_s,
            # All turns come through here, and a heartbeat would tell of those ended since.
            queue_s=self.ledger.prefill_s(view.name),
            active=self.ledger.turns(view.name),
            cached_tokens=cached,
            load_s=from_disk_s,
            held_tokens=view.tokens,
            agents=self.directory.agents_count(view.name),
            cold_order=self.ledger.cold_order(view.name),
            turn_order=self.ledger.turn_order(view.name),
        )

    def _matches(self, turn: TurnRequest) -> dict[NodeName, Match]:
        prompt = turn.prompt
        return self.sketches.matches(turn.tenant, prompt.sketch, prompt.opening)

    def _in_group(self, key: AgentKey, node: NodeName, group: AgentId | None) -> bool:
        """Say whether a group's request may continue that agent; unnamed ones may any."""
        if group is None:
            return True
        return any(h.node == node and h.group == group for h in self.directory.holdings(key))

    def _is_replica(self, key: AgentKey, node: NodeName) -> bool:
        """Say whether a node only keeps a copy of an agent: it does not go on with it."""
        holdings = self.directory.holdings(key)
        return any(h.node == node and h.state is OwnerState.REPLICA for h in holdings)

    def _is_hot(self, key: AgentKey, node: NodeName) -> bool:
        for holding in self.directory.holdings(key):
            if holding.node == node:
                return holding.view is None or "hot" in holding.view.tiers
        return False


def _weight(text: str) -> int:
    return xxh3_64(text.encode("utf-8", "surrogatepass")).intdigest()
