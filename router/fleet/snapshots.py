"""Snapshots of the fleet, taken here only, from all that the router knows."""

from itertools import islice

from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Directory, Holding
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
from router.limits import FORMED_MAX
from router.placement.decision import TurnFacts
from router.placement.snapshot import (
    AgentHolder,
    FleetSnapshot,
    HolderRole,
    NodeSnapshot,
    PrefixHolder,
)
from router.turn_request import TurnRequest


def facts_of(turn: TurnRequest, given_up: frozenset[NodeName] = frozenset()) -> TurnFacts:
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
    )


def of_turn(fleet: Fleet, turn: TurnRequest) -> FleetSnapshot:
    """Return a snapshot of the nodes and what they have of a turn's agent and prompt."""
    holders: tuple[AgentHolder, ...] = ()
    group_nodes: tuple[NodeName, ...] = ()
    if turn.key is not None:
        holders = _holders(fleet.directory, turn.key)
    elif turn.identity.agent is not None:
        owners = fleet.directory.group_owners(turn.tenant, turn.identity.agent)
        group_nodes = tuple(owner.node for owner in owners)
    return FleetSnapshot(_nodes(fleet), holders, _prefixes(fleet, turn), group_nodes)


def of_agent(fleet: Fleet, key: AgentKey) -> FleetSnapshot:
    """Return a snapshot of the nodes and the holders of an agent."""
    return FleetSnapshot(_nodes(fleet), _holders(fleet.directory, key))


def _nodes(fleet: Fleet) -> dict[NodeName, NodeSnapshot]:
    nodes = (_node(fleet, member) for member in fleet.membership.members)
    return {node.name: node for node in nodes if node is not None}


def _node(fleet: Fleet, member: Member) -> NodeSnapshot | None:
    if member.view is None:
        return None
    name, ledger = member.name, fleet.ledger
    lease = fleet.membership.health(name)
    return NodeSnapshot(
        view=member.view,
        is_alive=lease is LeaseState.ALIVE,
        is_up=lease is not LeaseState.EXPIRED,
        is_returning=fleet.membership.is_returning(name),
        promised_s=ledger.prefill_s(name),
        turns=ledger.turns(name),
        agents=fleet.directory.agents_count(name),
        turn_order=ledger.turn_order(name),
        cold_order=ledger.cold_order(name),
        coming_bytes=ledger.coming_bytes(name),
    )


def _holders(directory: Directory, key: AgentKey) -> tuple[AgentHolder, ...]:
    owner, started = directory.owner(key), directory.starting(key)
    last = owner or directory.released_owner(key)
    holders = [AgentHolder(started.node, HolderRole.STARTING)] if started else []
    if last is not None:
        role = HolderRole.OWNER if owner else HolderRole.RELEASED
        holders.append(AgentHolder(last.node, role, last.view))
    copies = [held for held in directory.unerased_holdings(key) if held is not last]
    copies.sort(key=_lateness, reverse=True)
    holders += [AgentHolder(copy.node, HolderRole.COPY, copy.view) for copy in copies]
    holders += [AgentHolder(node, HolderRole.ERASED) for node in directory.erasing(key)]
    return tuple(holders)


def _lateness(holding: Holding) -> tuple[int, int]:
    return holding.epoch, holding.view.revision if holding.view is not None else 0


def _prefixes(fleet: Fleet, turn: TurnRequest) -> tuple[PrefixHolder, ...]:
    prompt = turn.prompt
    matches = fleet.sketches.matches(turn.tenant, prompt.sketch, prompt.opening)
    prefixes: list[PrefixHolder] = []
    for node, match in matches.items():
        share, agent = match.pieces_count / len(prompt.sketch), match.continued
        held = fleet.directory.holding((turn.tenant, agent), node) if agent else None
        if held is None:
            prefixes.append(PrefixHolder(node, share, agent))
            continue
        is_replica = held.state is OwnerState.REPLICA
        is_resident = held.view is None or "hot" in held.view.tiers
        prefixes.append(PrefixHolder(node, share, agent, held.group, is_replica, is_resident))
    if turn.key is None and not any(prefix.agent and not prefix.is_replica for prefix in prefixes):
        prefixes = _with_formed(fleet, turn, prefixes)
    return tuple(sorted(prefixes, key=lambda prefix: (prefix.share, prefix.node), reverse=True))


def _with_formed(
    fleet: Fleet, turn: TurnRequest, prefixes: list[PrefixHolder]
) -> list[PrefixHolder]:
    """Add the owner of the conversation of which the prompt is another form."""
    formed = fleet.sketches.formed(turn.tenant, turn.prompt.forms)
    for agent in islice(dict.fromkeys(agent for _, agent in formed), FORMED_MAX):
        owner = fleet.directory.owner((turn.tenant, agent))  # it may have moved since
        if owner is None:
            continue
        share = next((prefix.share for prefix in prefixes if prefix.node == owner.node), 0.0)
        is_resident = owner.view is None or "hot" in owner.view.tiers
        found = PrefixHolder(owner.node, share, agent, owner.group, is_resident=is_resident)
        return [found, *(prefix for prefix in prefixes if prefix.node != owner.node)]
    return prefixes
