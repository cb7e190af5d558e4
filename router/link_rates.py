"""What the links between nodes carry, as the nodes measured them. Pure."""

from collections.abc import Iterable

from fabric import compression
from fabric.control import NodeView
from fabric.ids import NodeName
from fabric.link_estimate import UNMEASURED_SHARE
from fabric.links import LinkKind, LinkView


def link_bytes_per_s(source: NodeView | None, target: NodeView | None) -> float:
    """Return what the best working link from `source` to `target` carries; 0 if none does.

    Measured by the target, which fetches; else by the source, as most links carry both ways
    alike; else a share of nominal.
    """
    if source is None or target is None:
        return 0.0
    told = [link for link in target.links if link.peer == source.name]
    rates = [link.bytes_per_s for link in told if link.reachable and link.bytes_per_s]
    if not rates:
        back = [link for link in source.links if link.peer == target.name]
        rates = [link.bytes_per_s for link in back if link.reachable and link.bytes_per_s]
    if rates:
        return max(rates)
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
