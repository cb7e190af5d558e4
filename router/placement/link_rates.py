"""Rates of links between nodes: measured, or estimated from both ends' addresses. Pure."""

from collections.abc import Iterable, Sequence

from fabric.control.node_calls import NodeView
from fabric.ids import NodeName
from fabric.net.link_estimate import planned_bytes_per_s
from fabric.net.links import Address, LinkKind, LinkView, nominal_bytes_per_s

NOMINAL_BYTES_PER_S = 1e9 / 8  # of two nodes without a common kind of link


def rate(source: NodeView, target: NodeView) -> float:
    """Return the expected bytes per second from `source` to `target` over their best link.

    Measured rates are those that transfers reached, so they are used as they are; nominal rates are
    reduced.
    """
    measured = _measured_rate(source, target)
    nominal = _nominal_rate(source, target) if measured is None else 0.0
    return planned_bytes_per_s(measured, nominal)


def _measured_rate(source: NodeView, target: NodeView) -> float | None:
    """Return a rate that the target measured, which fetches, or else the source."""
    for near_end, far_end in ((target, source), (source, target)):
        peer, best = far_end.name, 0.0
        for link in near_end.links:
            if link.peer == peer and link.reachable and (link.bytes_per_s or 0.0) > best:
                best = link.bytes_per_s or 0.0
        if best:
            return best
    return None


def _nominal_rate(source: NodeView, target: NodeView) -> float:
    dead = {
        (link.host, link.port)
        for link in target.links
        if link.peer == source.name and link.reachable is False
    }
    alive = [a for a in source.addresses if (a.host, a.port) not in dead]
    source_rates, target_rates = _by_kind(alive), _by_kind(target.addresses)
    if source.host != target.host:
        source_rates.pop(LinkKind.LOOPBACK, None)
    shared = [
        min(source_rates[kind], target_rates[kind])
        for kind in source_rates.keys() & target_rates.keys()
    ]
    return max(shared, default=NOMINAL_BYTES_PER_S)


def _by_kind(addresses: Sequence[Address]) -> dict[LinkKind, float]:
    best: dict[LinkKind, float] = {}
    for address in addresses:
        rate = float(nominal_bytes_per_s(address))
        best[address.kind] = max(rate, best.get(address.kind, 0.0))
    return best


def best_by_kind(links: Iterable[LinkView]) -> dict[tuple[NodeName, LinkKind], LinkView]:
    """Return the fastest reachable link per peer and kind."""
    best: dict[tuple[NodeName, LinkKind], LinkView] = {}
    for link in links:
        if not link.reachable:
            continue
        old = best.get((link.peer, link.kind))
        if old is None or (link.bytes_per_s or 0.0) > (old.bytes_per_s or 0.0):
            best[link.peer, link.kind] = link
    return best
