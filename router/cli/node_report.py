"""Reports on nodes: the state of each, its figures with their limits, and its problems.

The dashboard uses the same words (`router/dashboard/static/words.js`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from router.cli.output import (
    failed_again,
    human_bytes,
    human_count,
    human_seconds,
    human_value,
)

Row = Mapping[str, Any]

DRAINED: Final = "drained"
_DRAINING: Final = "draining"
_EXIT_SHOWN_S: Final = 3_600.0  # for so long, `status` reports that a process has ended
_CERTIFICATE_SHOWN_S: Final = 30 * 86_400.0
_DAY_S: Final = 86_400
_UNUSUAL: Final = {
    "suspect": "has not answered for 2 s; its agents wait for it",
    "expired": "does not answer; its agents are served by other nodes",
    "asleep": "sleeps; its agents are served by other nodes until it is awake",
}
_CALM_HEAT: Final = (None, "nominal", "fair")
COLUMNS: Final = ("node", "state", "agents", "tokens", "memory", "disk", "model", "host", "pid")
WIDE_COLUMNS: Final = (
    *COLUMNS,
    *("active", "waiting", "prefill/s", "decode/s", "pressure", "heat", "version", "last exit"),
)


def shown_state(node: Row) -> str:
    """Return a node's state; `drained` or `stuck` if that is how its drain has ended."""
    state, drain = str(node.get("state")), node.get("drain") or {}
    return str(drain.get("state") or state) if state == _DRAINING else state


def node_cells(node: Row, *, wide: bool = False) -> tuple[object, ...]:
    """Return a node's cells of COLUMNS, or of WIDE_COLUMNS."""
    memory, usage, tiers = (node.get(name) or {} for name in ("memory", "usage", "bytes"))
    cells = (
        node.get("name"),
        shown_state(node),
        human_count(node.get("agents")),
        human_count(node.get("tokens")),
        _of_limit(tiers.get("hot"), memory.get("hot_limit_bytes")),
        _of_limit(tiers.get("disk"), usage.get("disk_limit_bytes")),
        node.get("model") or "-",
        node.get("host") or "-",
        node.get("pid") or "-",
    )
    if not wide:
        return cells
    last = node.get("last_exit") or {}
    return (
        *cells,
        human_count(node.get("active")),
        human_count(node.get("waiting")),
        _speed(node.get("prefill_tokens_per_s")),
        _speed(node.get("decode_tokens_per_s")),
        memory.get("pressure") or "-",
        node.get("thermal_state") or "-",
        (node.get("build") or {}).get("macfabric") or "-",
        f"{last.get('cause')} {human_value('at_s', last.get('at_s'))}" if last else "-",
    )


def _of_limit(held: Any, limit: Any) -> str:
    return human_bytes(held) + (f"/{human_bytes(limit)}" if limit else "")


def _speed(tokens_per_s: Any) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s else "-"


def problems(health: Row, nodes: Sequence[Row], now_s: float) -> Iterator[str]:
    """Yield the present problems of a fabric, each with the node's name first."""
    listed = {node.get("name") for node in nodes}
    for name in health.get("missing") or ():
        if name not in listed:
            yield f"{name} has not joined yet; its agents wait for it"
    if health.get("unmet"):
        yield f"{health['unmet']} expected nodes have not joined yet; their agents wait for them"
    for node in nodes:
        for problem in (*_states(node), *_faults(node, now_s)):
            yield f"{node.get('name')} {problem}"


def _states(node: Row) -> Iterator[str]:
    state = shown_state(node)
    if node.get("failure"):
        yield failed_again(node["failure"], node.get("starts_again_in_s"))
    elif state in _UNUSUAL:
        yield _UNUSUAL[state]
    elif state == DRAINED:
        yield "is drained: you can close its lid; `macfabric undrain` lets it take agents again"
    elif state == "stuck":
        yield "cannot be drained: some agents cannot be moved (`macfabric drain` lists them)"


def _faults(node: Row, now_s: float) -> Iterator[str]:
    test = node.get("self_test") or {}
    if not test.get("passed", True):
        yield f"failed its cache self-test: {test.get('detail')}"
    if node.get("degraded"):
        yield f"is degraded: {node['degraded']}"
    last = node.get("last_exit") or {}
    ago_s = now_s - (last.get("at_s") or 0)
    if last and last.get("cause") != "stopped" and ago_s < _EXIT_SHOWN_S:
        ago = human_seconds(ago_s)
        yield f"was restarted; its previous process, last seen {ago} ago: {last.get('detail')}"
    left_s = (node.get("certificate_ends_s") or float("inf")) - now_s
    if left_s < _CERTIFICATE_SHOWN_S:
        days = max(0, int(left_s // _DAY_S))
        yield f"has a certificate that ends in {days} days: see `macfabric certs rotate`"
    if node.get("template_warning"):
        yield str(node["template_warning"])
    pressure = (node.get("memory") or {}).get("pressure")
    if pressure not in (None, "normal"):
        yield f"keeps fewer agents in memory: its system reports memory pressure ({pressure})"
    if node.get("thermal_state") not in _CALM_HEAT:
        yield f"is slow: its Mac is hot ({node['thermal_state']})"
