"""How the fabric is, as JSON: everybody learns the status, operators what it comes from."""

from fabric import __version__
from fabric.codec import to_plain
from router.admin.views.row import Row
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
from router.http.auth import Principal

DOWN = "unavailable"


def health_row(fleet: Fleet, caller: Principal) -> Row:
    """Show whether anybody serves, and whether everybody remembers."""
    nodes = [_node_row(fleet, member) for member in fleet.membership.members]
    is_serving = bool(fleet.ready())
    is_whole = is_serving and all(node["ok"] for node in nodes)
    row: Row = {"status": "ok" if is_whole else "degraded" if is_serving else DOWN}
    if caller.operator is not None:
        row |= {"version": __version__, "nodes": nodes}
    return row


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
