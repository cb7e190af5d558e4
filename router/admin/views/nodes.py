"""JSON views of nodes, drains and the fabric's health; only operators get all fields."""

from collections.abc import Sequence
from typing import Final

from fabric import __version__
from fabric.codec import to_plain
from fabric.control.node_calls import AgentView, NodeView
from fabric.ids import NodeName, TenantId
from fabric.sampling_defaults import BUILT_IN, BUILT_IN_SOURCE
from router.admin.views.shape import AnswerShape, Row
from router.api.openapi import OBJECT
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
from router.http.forwarded import Principal
from router.limits import DRAIN_STUCK_MAX
from router.moves.drains import Drains

_NODE: Final = AnswerShape(
    NodeView, None, "host", "pid", "model", "fingerprint", "context_tokens_max",
    "prompt_bytes_max", "agents", "tokens", "bytes", "free", "thermal_state", "bytes_per_token",
    "addresses", "links", "incarnation", "active", "waiting", "queue_s", "prefill_tokens_per_s",
    "decode_tokens_per_s", "self_test", "degraded", "evicted_agents", "reuse", "scrubbed_bytes",
    "damaged_blocks", "template_warning", "build", "protocol", "usage", "last_exit",
    "certificate_ends_s", "failed_rounds", "fenced_turns", "control", "control_min",
    beside={"name": str, "state": str, "health": str, "memory": OBJECT, "epoch": int,
            "sampling": OBJECT},
)  # fmt: skip


def node_rows(fleet: Fleet, drains: Drains, caller: Principal) -> list[Row]:
    """Return all nodes as JSON rows, including lost ones; a tenant sees only its own data."""
    members = fleet.membership.members
    if caller.operator is not None:
        rows = [_whole_row(fleet, member) for member in members]
    else:
        agents = {} if caller.tenant is None else _agents_by_node(fleet, caller.tenant)
        rows = [_tenant_row(fleet, member, agents.get(member.name, ())) for member in members]
    return [row | {"drain": drain_row(drains, row["name"], caller)} for row in rows]


def drain_row(drains: Drains, node: NodeName, caller: Principal) -> Row | None:
    """Show a node's drain: a tenant's own stuck agents, and counts for operators."""
    drain = drains.find(node)
    if drain is None:
        return None
    stuck = [(key[1], drain.stuck[key]) for key in sorted(drain.stuck) if key[0] == caller.tenant]
    row = {
        "node": node,
        "object": "node.drain",
        "state": drain.state.value,
        "stuck": [
            {"id": agent, "code": why.code, "message": why.message}
            for agent, why in stuck[:DRAIN_STUCK_MAX]
        ],
    }
    if caller.operator is None:
        return row
    return row | {
        "agents_moved": drain.moved_count,
        "agents_left": drain.left_count,
        "bytes_sent": drain.sent_bytes,
        "seconds": drains.seconds(drain),
        "stuck_others": len(drain.stuck) - len(stuck[:DRAIN_STUCK_MAX]),
    }


def _agents_by_node(fleet: Fleet, tenant: TenantId) -> dict[NodeName, list[AgentView]]:
    """Return a tenant's agents by node."""
    directory, by_node = fleet.directory, dict[NodeName, list[AgentView]]()
    for agent in directory.agents(tenant):
        for holding in directory.holdings((tenant, agent)):
            if holding.view is not None:
                by_node.setdefault(holding.node, []).append(holding.view)
    return by_node


def _tenant_row(fleet: Fleet, member: Member, agents: Sequence[AgentView]) -> Row:
    view = member.view
    row = {"name": member.name, "state": fleet.membership.state_of(member)}
    if view is None:
        return row
    return row | {
        "health": fleet.membership.health(member.name).value,
        "model": view.model,
        "fingerprint": view.fingerprint,
        "context_tokens_max": view.context_tokens_max,
        "prompt_bytes_max": view.prompt_bytes_max,
        "sampling": sampling_in_force(view),
        "agents": len(agents),
        "tokens": sum(agent.tokens for agent in agents),
        "bytes": {
            "hot": sum(agent.bytes.hot for agent in agents),
            "disk": sum(agent.bytes.disk for agent in agents),
        },
    }


def _whole_row(fleet: Fleet, member: Member) -> Row:
    view, failure = member.view, _failure(fleet, member)
    state = fleet.membership.state_of(member)
    if view is None:
        return {"name": member.name, "state": state} | failure
    memory = {
        "pressure": view.memory_pressure,
        "hot_limit_bytes": view.hot_limit_bytes,
        "hot_total_bytes": view.hot_total_bytes,
    }
    return failure | _NODE.row(
        view,
        name=member.name,
        state=state,
        health=fleet.membership.health(member.name).value,
        memory=memory,
        sampling=sampling_in_force(view),
        epoch=fleet.directory.epoch_of(member.name),
    )


def sampling_in_force(view: NodeView) -> Row:
    """Show each sampling field's value for requests that leave it out, and where it is from."""
    row = {name: {"value": value, "source": BUILT_IN_SOURCE} for name, value in BUILT_IN.items()}
    chosen = {
        each.field: {"value": each.value, "source": each.source} for each in view.sampling or ()
    }
    return row | chosen


def _failure(fleet: Fleet, member: Member) -> Row:
    if member.failure is None:
        return {}
    row: Row = {"failure": member.failure.message}
    if member.failure.again_s is not None:
        left_s = max(0.0, member.failure.again_s - fleet.clock.monotonic_s())
        row["starts_again_in_s"] = round(left_s, 1)
    return row


DOWN = "unavailable"
DRAINING = "draining"  # the router is stopping: running turns end, new ones are refused
PARTIAL = "partial"  # some nodes, and their agents, have not joined yet


def health_row(fleet: Fleet, caller: Principal) -> Row:
    """Show whether the fabric serves, and which nodes are missing."""
    nodes = [_node_row(fleet, member) for member in fleet.membership.members]
    row: Row = {"status": _status(fleet, nodes)}
    if caller.operator is not None:
        missing = fleet.discovery.missing
        joining = [member.name for member in fleet.membership.members if _is_joining(member)]
        row |= {"version": __version__, "nodes": nodes, "urls": fleet.urls}
        row |= {"missing": sorted([*missing.names, *joining]), "unmet": missing.count}
    return row


def _status(fleet: Fleet, nodes: Sequence[Row]) -> str:
    if not fleet.ready():
        return DOWN
    members = fleet.membership.members
    if fleet.discovery.missing.count or any(map(_is_joining, members)):
        return PARTIAL
    return "ok" if all(node["ok"] for node in nodes) else "degraded"


def _is_joining(member: Member) -> bool:
    """Return whether a node has yet to report its agents since the router started."""
    return member.listed is None


def _node_row(fleet: Fleet, member: Member) -> Row:
    view = member.view
    health = fleet.membership.health(member.name)
    is_ok = (
        view is not None
        and health is LeaseState.ALIVE
        and view.self_test.passed
        and view.degraded is None
    )
    return {
        "name": member.name,
        "state": health.value,
        "ok": is_ok,
        "self_test": to_plain(view.self_test) if view else None,
        "reuse": view.reuse if view else None,
        "degraded": view.degraded if view else None,
        "damaged_blocks": view.damaged_blocks if view else None,
    }
