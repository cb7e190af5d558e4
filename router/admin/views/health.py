"""The fabric's health as JSON: the status for everyone, its reasons for operators."""

from collections.abc import Sequence

from fabric import __version__
from fabric.codec import to_plain
from router.admin.views.shape import Row
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
from router.http.auth import Principal

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
        row |= {"version": __version__, "nodes": nodes}
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
