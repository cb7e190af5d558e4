"""The nodes and their drains as JSON: in full for operators, to tenants what is their own."""

from collections.abc import Sequence

from fabric.codec import to_plain
from fabric.control.node_calls import AgentView
from fabric.ids import NodeName, TenantId
from router.admin.views.row import Row
from router.fleet.fleet import Fleet
from router.fleet.membership import Member
from router.http.auth import Principal
from router.limits import DRAIN_STUCK_MAX
from router.moves.drains import Drains


def node_rows(fleet: Fleet, drains: Drains, caller: Principal) -> list[Row]:
    """Show all nodes, lost ones included; to tenants without what others have there."""
    members = fleet.membership.members
    if caller.operator is not None:
        rows = [_whole_row(fleet, member) for member in members]
    else:
        held = {} if caller.tenant is None else _held(fleet, caller.tenant)
        rows = [_tenant_row(fleet, member, held.get(member.name, ())) for member in members]
    return [row | {"drain": drain_row(drains, row["name"], caller)} for row in rows]


def drain_row(drains: Drains, node: NodeName, caller: Principal) -> Row | None:
    """Show a node's drain: the names of a tenant's own agents, and for operators the counts."""
    drain = drains.find(node)
    if drain is None:
        return None
    own = [(key[1], drain.stuck[key]) for key in sorted(drain.stuck) if key[0] == caller.tenant]
    row = {
        "node": node,
        "object": "node.drain",
        "state": drain.state.value,
        "stuck": [
            {"id": agent, "code": why.code, "message": why.message}
            for agent, why in own[:DRAIN_STUCK_MAX]
        ],
    }
    if caller.operator is None:
        return row
    return row | {
        "agents_moved": drain.moved_count,
        "agents_left": drain.left_count,
        "bytes_sent": drain.sent_bytes,
        "seconds": drains.seconds(drain),
        "stuck_others": len(drain.stuck) - len(own[:DRAIN_STUCK_MAX]),
    }


def _held(fleet: Fleet, tenant: TenantId) -> dict[NodeName, list[AgentView]]:
    """Return what a tenant's agents have on each node."""
    directory, held = fleet.directory, dict[NodeName, list[AgentView]]()
    for agent in directory.agents(tenant):
        for holding in directory.holdings((tenant, agent)):
            if holding.view is not None:
                held.setdefault(holding.node, []).append(holding.view)
    return held


def _tenant_row(fleet: Fleet, member: Member, own: Sequence[AgentView]) -> Row:
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
        "agents": len(own),
        "tokens": sum(each.tokens for each in own),
        "bytes": {
            "hot": sum(each.bytes.hot for each in own),
            "disk": sum(each.bytes.disk for each in own),
        },
    }


def _whole_row(fleet: Fleet, member: Member) -> Row:
    view, failure = member.view, _failure(fleet, member)
    state = fleet.membership.state_of(member)
    if view is None:
        return {"name": member.name, "state": state} | failure
    return {
        "name": member.name,
        "host": view.host,
        "pid": view.pid,
        "state": state,
        "health": fleet.membership.health(member.name).value,
        **failure,
        "model": view.model,
        "fingerprint": view.fingerprint,
        "context_tokens_max": view.context_tokens_max,
        "prompt_bytes_max": view.prompt_bytes_max,
        "agents": view.agents,
        "tokens": view.tokens,
        "bytes": to_plain(view.bytes),
        "free": to_plain(view.free),
        "memory": {
            "pressure": view.memory_pressure,
            "hot_limit_bytes": view.hot_limit_bytes,
            "hot_total_bytes": view.hot_total_bytes,
        },
        "thermal_state": view.thermal_state,
        "bytes_per_token": view.bytes_per_token,
        "addresses": to_plain(view.addresses),
        "links": to_plain(view.links),
        "epoch": fleet.directory.epoch_of(member.name),
        "incarnation": view.incarnation,
        "active": view.active,
        "waiting": view.waiting,
        "queue_s": view.queue_s,
        "prefill_tokens_per_s": view.prefill_tokens_per_s,
        "decode_tokens_per_s": view.decode_tokens_per_s,
        "self_test": to_plain(view.self_test),
        "degraded": view.degraded,
        "evicted_agents": view.evicted_agents,
        "reuse": view.reuse,
        "scrubbed_bytes": view.scrubbed_bytes,
        "damaged_blocks": view.damaged_blocks,
    }


def _failure(fleet: Fleet, member: Member) -> Row:
    if member.failure is None:
        return {}
    left_s = max(0.0, member.failure.again_s - fleet.clock.monotonic_s())
    return {"failure": member.failure.message, "starts_again_in_s": round(left_s, 1)}
