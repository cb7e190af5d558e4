"""Snapshots of the fleet, taken here only, from all of the router's state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from fabric.ids import AgentId, AgentKey, NodeName
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import OwnerState
from router.fleet.directory import Directory, Holding
from router.fleet.fleet import Fleet
from router.limits import (
    CANDIDATES_MAX,
    CONTINUED_MAX,
    FORM_AGENTS_MAX,
    GROUP_NODES_MAX,
    HOMES_MAX,
    MOVE_TARGETS_MAX,
)
from router.placement.agent_moves import ANSWER_TOKENS, MESSAGE_TOKENS
from router.placement.candidates import Cached, TurnWork
from router.placement.decision import TurnFacts
from router.placement.placement import SERVING
from router.placement.sketch_index import Level, Match
from router.placement.snapshot import (
    AgentHolder,
    FleetSnapshot,
    HolderRole,
    NodeSnapshot,
    PrefixHolder,
)
from router.turn_request import TurnRequest


def facts_of(
    turn: TurnRequest,
    given_up: frozenset[NodeName] = frozenset(),
    full: frozenset[NodeName] = frozenset(),
) -> TurnFacts:
    """Return the facts about a turn that placement needs."""
    named = turn.key is not None
    return TurnFacts(
        model=turn.model,
        prompt_tokens=turn.prompt.tokens_estimate,
        completion_tokens_max=turn.sampling.max_tokens,
        home_seed=f"{turn.tenant}:{turn.identity.agent or turn.prompt.opening}",
        agent=turn.identity.agent if named else None,
        group=None if named else turn.identity.agent,
        given_up=given_up,
        full=full,
        may_fetch=turn.resume is None,
    )


def of_turn(
    fleet: Fleet,
    turn: TurnRequest,
    given_up: frozenset[NodeName] = frozenset(),
    full: frozenset[NodeName] = frozenset(),
    *,
    is_whole: bool = False,
) -> FleetSnapshot:
    """Return a snapshot of the nodes and what they have of a turn's agent and prompt.

    Of a large fleet, it has the nodes among which the turn may be placed; all if `is_whole`.
    """
    holders: tuple[AgentHolder, ...] = ()
    group_nodes: tuple[NodeName, ...] = ()
    if turn.key is not None:
        holders = _holders(fleet.directory, turn.key)
    elif turn.identity.agent is not None:
        owners = fleet.directory.group_owners(turn.tenant, turn.identity.agent)
        session_nodes = fleet.sessions.nodes(turn.tenant, turn.sub_agent)
        group_nodes = (*session_nodes, *(owner.node for owner in owners))
    else:
        group_nodes = fleet.sessions.nodes(turn.tenant, turn.sub_agent, turn.session)
    if is_whole or not fleet.nodes.is_large:
        prefixes = _prefixes(fleet, turn)
        snapshot = FleetSnapshot(fleet.nodes.all(), holders, prefixes, group_nodes)
    elif any(_serves(fleet, holder, given_up) for holder in holders):
        snapshot = FleetSnapshot(fleet.nodes.of(holder.node for holder in holders), holders)
    else:
        snapshot = _Narrowing(fleet, turn, given_up | full, holders, group_nodes).snapshot()
    key = turn.key or _continued_agent(turn, snapshot.prefixes)
    if turn.key is None and key is not None:
        holders = _holders(fleet.directory, key)
    agent = key[1] if key is not None else None
    return replace(snapshot, holders=holders, agent=agent, now_s=fleet.clock.monotonic_s())


def with_move_targets(fleet: Fleet, turn: TurnRequest, snapshot: FleetSnapshot) -> FleetSnapshot:
    """Add to a turn's snapshot the nodes to which its agent may move, if it is idle and free."""
    owner, activity = snapshot.owner, fleet.activity
    if snapshot.agent is None or owner is None:
        return snapshot
    key = turn.tenant, snapshot.agent
    if activity.is_held(key, owner.node) or not activity.is_idle(key):
        return snapshot
    nodes = snapshot.nodes
    if fleet.nodes.is_large:
        names = dict.fromkeys(holder.node for holder in snapshot.holders)
        names |= _least_loaded(fleet, owner.node, MOVE_TARGETS_MAX)
        nodes = {**nodes, **fleet.nodes.of(name for name in names if name not in nodes)}
    return replace(
        snapshot,
        nodes=nodes,
        is_idle=True,
        moved_lately=activity.moved_lately(key),
        move_price=activity.move_price,
    )


def _continued_agent(turn: TurnRequest, prefixes: Sequence[PrefixHolder]) -> AgentKey | None:
    """Return the agent whose conversation an unnamed turn continues, if it has an owner."""
    if not turn.is_kept:
        return None
    owned = (prefix.agent for prefix in prefixes if prefix.agent and not prefix.is_replica)
    agent = next(owned, None)
    return (turn.tenant, AgentId(agent)) if agent is not None else None


def of_agent(fleet: Fleet, key: AgentKey) -> FleetSnapshot:
    """Return a snapshot of the nodes and the holders of an agent.

    Of a large fleet, it has the owner's measured peers and the nodes with the least load.
    """
    holders, now_s = _holders(fleet.directory, key), fleet.clock.monotonic_s()
    if not fleet.nodes.is_large:
        return FleetSnapshot(fleet.nodes.all(), holders, now_s=now_s)
    names = dict.fromkeys(holder.node for holder in holders)
    if holders:
        names |= _least_loaded(fleet, holders[0].node, CANDIDATES_MAX)
    return FleetSnapshot(fleet.nodes.of(names), holders, now_s=now_s)


def _least_loaded(fleet: Fleet, home: NodeName, count: int) -> dict[NodeName, None]:
    """Return the nodes of a large fleet that may take an agent: home's peers, and idle ones."""
    last = fleet.nodes.find(home)
    if last is None:
        return {}
    names = dict.fromkeys(link.peer for link in last.view.links)
    ranking = fleet.nodes.ranking(last.view.model)
    work = TurnWork.of(MESSAGE_TOKENS, ANSWER_TOKENS)
    return names | dict.fromkeys(ranking.cheapest(work, count, names.__contains__))


def _serves(fleet: Fleet, holder: AgentHolder, given_up: frozenset[NodeName]) -> bool:
    """Return whether a node serves its agent's turns, so that no other node is compared."""
    if holder.role not in SERVING or holder.node in given_up:
        return False
    return fleet.is_up(holder.node) or fleet.membership.is_returning(holder.node)


class _Narrowing:
    """Choice of the nodes of a large fleet among which one turn is placed."""

    def __init__(
        self,
        fleet: Fleet,
        turn: TurnRequest,
        given_up: frozenset[NodeName],
        holders: tuple[AgentHolder, ...],
        group_nodes: tuple[NodeName, ...],
    ) -> None:
        self._fleet = fleet
        self._turn = turn
        self._holders = holders
        self._group_nodes = group_nodes
        self._ranking = fleet.nodes.ranking(turn.model)
        erased = {holder.node for holder in holders if holder.role is HolderRole.ERASED}
        self._refused = given_up | erased
        self._names: dict[NodeName, None] = {}  # chosen, in the order of their choice
        self._found_nodes: dict[NodeName, NodeSnapshot | None] = {}

    def snapshot(self) -> FleetSnapshot:
        """Return the snapshot: holders, continued conversations, group, home, then the cheapest."""
        turn, facts, names = self._turn, facts_of(self._turn), self._names
        levels = self._fleet.sketches.levels(turn.tenant, turn.prompt.sketch)
        names |= dict.fromkeys(holder.node for holder in self._holders)
        continued = self._find_continued(levels)
        names |= dict.fromkeys(continued)
        formed = self._fleet.sketches.formed(turn.tenant, turn.prompt.forms)
        if turn.key is None and (continued or any(formed)):
            prefixes = _prefix_holders(self._fleet, turn, self._matches(levels, continued))
            if any(map(self._continues, prefixes)):
                return FleetSnapshot(self._nodes(prefixes), self._holders, prefixes)
        up = (node for node in self._group_nodes if self._fleet.is_up(node))
        names |= dict.fromkeys(islice(up, GROUP_NODES_MAX))
        homes = self._ranking.homes(facts.home_seed, HOMES_MAX, self._is_refused)
        names |= dict.fromkeys(homes)
        ready = sum(name in self._ranking and not self._is_refused(name) for name in names)
        names |= dict.fromkeys(
            self._ranking.cheapest(
                TurnWork.of(facts.prompt_tokens, facts.completion_tokens_max),
                max(CANDIDATES_MAX - ready, CANDIDATES_MAX // 2),
                self._is_taken,
                [self._cached_level(level, facts.prompt_tokens) for level in _unequal(levels)],
            )
        )
        prefixes = _prefix_holders(self._fleet, turn, self._matches(levels, continued))
        return FleetSnapshot(
            self._nodes(prefixes),
            self._holders,
            prefixes,
            self._group_nodes,
            self._ranking.totals if len(self._ranking) else None,
            homes[0] if homes else None,
        )

    def _matches(
        self, levels: Sequence[Level], continued: Mapping[NodeName, AgentId]
    ) -> dict[NodeName, Match]:
        """Return the part of the prompt that each chosen node has."""
        deepest = ((name, _deepest(levels, name)) for name in self._names)
        return {
            name: Match(level.pieces_count, continued.get(name), level.state(name))
            for name, level in deepest
            if level is not None
        }

    def _continues(self, prefix: PrefixHolder) -> bool:
        """Return whether a node that serves the turn's model owns the continued conversation."""
        if prefix.agent is None or prefix.is_replica or prefix.node in self._refused:
            return False
        node = self._find_node(prefix.node)
        return node is not None and node.is_up and node.view.model == self._turn.model

    def _nodes(self, prefixes: Iterable[PrefixHolder]) -> dict[NodeName, NodeSnapshot]:
        """Return the chosen nodes, and those of prefixes."""
        names = self._names | dict.fromkeys(prefix.node for prefix in prefixes)
        nodes = ((name, self._find_node(name)) for name in names)
        return {name: node for name, node in nodes if node is not None}

    def _is_refused(self, name: NodeName) -> bool:
        if name in self._refused:
            return True
        node = self._find_node(name)
        return node is None or not node.is_alive

    def _find_node(self, name: NodeName) -> NodeSnapshot | None:
        if name not in self._found_nodes:
            self._found_nodes[name] = self._fleet.nodes.find(name)
        return self._found_nodes[name]

    def _is_taken(self, name: NodeName) -> bool:
        return name in self._names or self._is_refused(name)

    def _find_continued(self, levels: Sequence[Level]) -> dict[NodeName, AgentId]:
        """Return the agents that the prompt continues, by node; of many nodes, those up."""
        continued: dict[NodeName, AgentId] = {}
        sketches, turn = self._fleet.sketches, self._turn
        for level in reversed(levels):
            for node in level.agents:
                if len(continued) == CONTINUED_MAX:
                    return continued
                if node not in continued and self._fleet.is_up(node):
                    agent = sketches.continued(turn.tenant, node, level, turn.prompt.opening)
                    if agent is not None:
                        continued[node] = agent
        return continued

    def _cached_level(self, level: Level, prompt_tokens: int) -> Cached:
        tokens = self._turn.prompt.share(level.pieces_count) * prompt_tokens
        return Cached(tokens - tokens % BLOCK_TOKENS, level.nodes)


def _unequal(levels: Sequence[Level]) -> list[Level]:
    """Return the last of the beginnings that equally many nodes have: those are the same nodes."""
    return [
        level
        for level, longer in zip_longest(levels, levels[1:])
        if longer is None or len(longer.nodes) < len(level.nodes)
    ]


def _deepest(levels: Sequence[Level], node: NodeName) -> Level | None:
    return next((level for level in reversed(levels) if node in level.nodes), None)


def _holders(directory: Directory, key: AgentKey) -> tuple[AgentHolder, ...]:
    owner, started = directory.owner(key), directory.start_reservation(key)
    last = owner or directory.released_owner(key)
    holders = [AgentHolder(started.node, HolderRole.STARTING)] if started else []
    if last is not None:
        role = HolderRole.OWNER if owner else HolderRole.RELEASED
        holders.append(AgentHolder(last.node, role, last.view))
    copies = [holding for holding in directory.unerased_holdings(key) if holding is not last]
    copies.sort(key=_lateness, reverse=True)
    holders += [AgentHolder(copy.node, HolderRole.COPY, copy.view) for copy in copies]
    holders += [AgentHolder(node, HolderRole.ERASED) for node in directory.erasing_nodes(key)]
    return tuple(holders)


def _lateness(holding: Holding) -> tuple[int, int]:
    return holding.epoch, holding.view.revision if holding.view is not None else 0


def _prefixes(fleet: Fleet, turn: TurnRequest) -> tuple[PrefixHolder, ...]:
    prompt = turn.prompt
    matches = fleet.sketches.matches(turn.tenant, prompt.sketch, prompt.opening)
    return _prefix_holders(fleet, turn, matches)


def _prefix_holders(
    fleet: Fleet, turn: TurnRequest, matches: Mapping[NodeName, Match]
) -> tuple[PrefixHolder, ...]:
    prefixes: list[PrefixHolder] = []
    for node, match in matches.items():
        share, agent = turn.prompt.share(match.pieces_count), match.continued
        holding = fleet.directory.holding((turn.tenant, agent), node) if agent else None
        if holding is None:
            prefixes.append(PrefixHolder(node, share, agent, state=match.state))
            continue
        is_replica = holding.state is OwnerState.REPLICA
        held_as = holding.group, is_replica, holding.is_resident, match.state
        prefixes.append(PrefixHolder(node, share, agent, *held_as))
    if turn.key is None and not any(prefix.agent and not prefix.is_replica for prefix in prefixes):
        prefixes = _with_formed(fleet, turn, prefixes)
    return tuple(sorted(prefixes, key=lambda prefix: (prefix.share, prefix.node), reverse=True))


def _with_formed(
    fleet: Fleet, turn: TurnRequest, prefixes: list[PrefixHolder]
) -> list[PrefixHolder]:
    """Add the owner of the conversation of which the prompt is another form."""
    formed = fleet.sketches.formed(turn.tenant, turn.prompt.forms)
    for agent in islice(dict.fromkeys(agent for _, agent in formed), FORM_AGENTS_MAX):
        owner = fleet.directory.owner((turn.tenant, agent))  # it may have moved since
        if owner is None:
            continue
        share = next((prefix.share for prefix in prefixes if prefix.node == owner.node), 0.0)
        found = PrefixHolder(owner.node, share, agent, owner.group, is_resident=owner.is_resident)
        return [found, *(prefix for prefix in prefixes if prefix.node != owner.node)]
    return prefixes
