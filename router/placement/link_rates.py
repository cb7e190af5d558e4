"""What the links between nodes carry, as the nodes measured them. Pure."""

from collections.abc import Iterable

from fabric.control.node_calls import NodeView
from fabric.ids import NodeName
from fabric.net import compression
from fabric.net.link_estimate import UNMEASURED_SHARE
from fabric.net.links import LinkKind, LinkView


def measured_bytes_per_s(source: NodeView, target: NodeView) -> float:
    """Return what the best working link from `source` to `target` was seen to carry, or 0.

    By the target, which fetches; else by the source, as most links carry both ways alike.
    """
    for here, there in ((target, source), (source, target)):
        told = [link for link in here.links if link.peer == there.name and link.reachable]
        rates = [link.bytes_per_s for link in told if link.bytes_per_s]
        if rates:
            return max(rates)
    return 0.0


def link_bytes_per_s(source: NodeView | None, target: NodeView | None) -> float:
    """Return what the best link between two nodes carries, or a share of nominal; 0 if none."""
    if source is None or target is None:
        return 0.0
    measured = measured_bytes_per_s(source, target)
    if measured:
        return measured
    told = [link for link in target.links if link.peer == source.name]
    dead = {(link.host, link.port) for link in told if link.reachable is False}
    nominal = [
        UNMEASURED_SHARE * compression.link_bytes_per_s(address)
        for address in source.addresses
        if (address.host, address.port) not in dead
    ]
    return max(nominal, default=0.0)


def best_by_kind(links: Iterable[LinkView]) -> dict[tuple[NodeName, LinkKind], LinkView]:
    """Pick the fastest reachable link per peer and kind."""
    best: dict[tuple[NodeName, LinkKind], LinkView] = {}
    for link in links:
        if not link.reachable:
            continue
        old = best.get((link.peer, link.kind))
        if old is None or (link.bytes_per_s or 0.0) > (old.bytes_per_s or 0.0):
            best[link.peer, link.kind] = link
    return best
