"""Checks of the paths between nodes: a description of each, and known pitfalls.

Works on the answer of `GET /v1/nodes`, so it may run on any machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from itertools import combinations
from typing import Any, Final

from fabric.codec import from_plain
from fabric.errors import RejectedError
from fabric.ids import NodeName
from fabric.net.link_estimate import planned_bytes_per_s
from fabric.net.links import Address, AddressScope, LinkKind, LinkView, nominal_bytes_per_s
from router.cli.doctor.finding import Check

_WORDS: Final = {
    LinkKind.THUNDERBOLT: "Thunderbolt",
    LinkKind.ETHERNET: "Ethernet",
    LinkKind.WIFI: "Wi-Fi",
    LinkKind.LOOPBACK: "loopback",
    LinkKind.OTHER: "another kind of link",
}
_STATIC: Final = (
    "give both ends of the cable a static address of a network of its own, such as 10.88.0.1 "
    "and 10.88.0.2 with mask 255.255.255.252"
)
_PROBLEMS: Final = {
    "silent": "no answer: a cable or switch is dead, the peer sleeps, or a firewall drops packets",
    "host_unreachable": (
        "the system has no route there (EHOSTUNREACH). On macOS Local Network Privacy causes "
        "the same error without permission: allow it in System Settings, Privacy & Security, "
        "Local Network, or start the node over ssh or as a LaunchDaemon"
    ),
    "network_unreachable": "no interface of the node leads to that network",
    "refused": "nothing listens there: has another machine that address?",
    "broken": "connections break",
    "interface_gone": "the node's interface went away",
    "forbidden": "the system forbids it: look at the firewall",
    "wrong_node": "another node answers: two machines have the same address",
    "bad_key": "the machine that answers does not have this cluster's key",
    "fingerprint_mismatch": "the two run different models, so they exchange no caches",
    "protocol_version": "the two run different versions of macfabric",
    "bad_frame": "the two run different versions of macfabric",
}


@dataclass(frozen=True, slots=True)
class Station:
    """One node with its addresses and links."""

    name: NodeName
    addresses: tuple[Address, ...]
    links: tuple[LinkView, ...]

    def has(self, kind: LinkKind) -> bool:
        return any(address.kind is kind for address in self.addresses)


def stations_of(rows: Sequence[dict[str, Any]]) -> list[Station]:
    """Read the nodes that report their links; others, such as older ones, are left out."""
    stations = []
    for row in rows:
        name, links = row.get("name"), row.get("links")
        if not isinstance(name, str) or links is None:
            continue
        try:
            addresses = from_plain(tuple[Address, ...], row.get("addresses"), "addresses")
            link_views = from_plain(tuple[LinkView, ...], links, "links")
        except RejectedError:
            continue
        stations.append(Station(NodeName(name), addresses, link_views))
    return stations


def link_rows(stations: Sequence[Station]) -> list[dict[str, Any]]:
    """List every path for programs."""
    return [
        {
            "node": station.name,
            "peer": link.peer,
            "kind": link.kind.value,
            "device": link.device,
            "host": link.host,
            "reachable": link.reachable,
            "problem": link.problem,
            "rtt_s": link.rtt_s,
            "bytes_per_s": link.bytes_per_s,
            "first": link is _first(station, link.peer),
            "words": path_in_words(station, link),
        }
        for station in stations
        for link in station.links
    ]


def link_checks(stations: Sequence[Station]) -> Iterator[Check]:
    """Yield a check of every path, then the pitfalls that addresses and paths reveal."""
    for station in stations:
        for link in station.links:
            verdict = "warning" if link.reachable is False else "ok"
            yield Check(f"{station.name} from {link.peer}", verdict, path_in_words(station, link))
        yield from _one_network(station)
        yield from _link_local(station)
    yield from _unused_cables(stations)


def path_in_words(station: Station, link: LinkView) -> str:
    """Return a description of one path."""
    through = f" through {link.device}" if link.device else ""
    path = f"{_WORDS[link.kind]} {link.host}{through}"
    if link.reachable is None:
        return f"{path}: not tried yet"
    if not link.reachable:
        why = _PROBLEMS.get(link.problem or "", f"it failed ({link.problem})")
        if link.host.startswith("169.254.") and link.problem in {"silent", "host_unreachable"}:
            why = (
                "no answer: macOS sends 169.254 through its primary interface unless a "
                f"program binds the other one. To be safe, {_STATIC}; also: {why}"
            )
        return f"{path}: not used: {why}"
    first = _first(station, link.peer)
    use = "used first" if link is first else "used when the faster one fails or is not enough"
    return f"{path}: {_delay(link.rtt_s)}, {_rate(link.bytes_per_s)}; {use}"


def _first(station: Station, peer: NodeName) -> LinkView | None:
    works = [link for link in station.links if link.peer == peer and link.reachable]
    return max(works, key=_expected, default=None)


def _expected(link: LinkView) -> float:
    nominal = nominal_bytes_per_s(Address(link.host, link.port, link.kind))
    return planned_bytes_per_s(link.bytes_per_s, nominal)


def _delay(rtt_s: float | None) -> str:
    return "delay unknown" if rtt_s is None else f"{1000 * rtt_s:.2g} ms"


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "speed not measured yet"
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2g} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def _network(address: Address) -> IPv4Network | None:
    if not 0 < address.prefix_bits < 32:
        return None
    network = ip_network(f"{address.host}/{address.prefix_bits}", strict=False)
    return network if isinstance(network, IPv4Network) else None


def _one_network(station: Station) -> Iterator[Check]:
    for one, other in combinations(station.addresses, 2):
        cables = LinkKind.THUNDERBOLT in {one.kind, other.kind} and one.kind is not other.kind
        networks = _network(one), _network(other)
        if not cables or None in networks or one.scope is AddressScope.LINK:
            continue
        assert networks[0] is not None, "checked above"
        assert networks[1] is not None, "checked above"
        if networks[0].overlaps(networks[1]):
            yield Check(
                f"{station.name} networks",
                "warning",
                f"{_named(one)} and {_named(other)} are in one network: the system uses one cable "
                "for both, macfabric's own transfers excepted. If the Thunderbolt Bridge has its "
                f"address by DHCP from the LAN, turn that off; {_STATIC}",
            )


def _link_local(station: Station) -> Iterator[Check]:
    cables = [a for a in station.addresses if a.kind is LinkKind.THUNDERBOLT]
    if cables and all(address.scope is AddressScope.LINK for address in cables):
        yield Check(
            f"{station.name} Thunderbolt",
            "ok",
            f"{_named(cables[0])} has a self-assigned address; that works here, as each connection "
            f"names its interface, but the address may change. To keep it, {_STATIC}",
        )


def _unused_cables(stations: Sequence[Station]) -> Iterator[Check]:
    by_name = {station.name: station for station in stations}
    for station in stations:
        for peer in sorted({link.peer for link in station.links}):
            first, other = _first(station, peer), by_name.get(peer)
            if first is None or other is None or first.kind is LinkKind.THUNDERBOLT:
                continue
            both = station.has(LinkKind.THUNDERBOLT) and other.has(LinkKind.THUNDERBOLT)
            works = any(
                link.kind is LinkKind.THUNDERBOLT and link.reachable
                for link in station.links
                if link.peer == peer
            )
            if both and not works:
                yield Check(
                    f"{station.name} from {peer}",
                    "warning",
                    f"both have Thunderbolt, but only {_WORDS[first.kind]} joins them: is there a "
                    f"cable between these two? If there is, {_STATIC}",
                )


def _named(address: Address) -> str:
    bits = f"/{address.prefix_bits}" if address.prefix_bits else ""
    return f"{address.device or _WORDS[address.kind]} {address.host}{bits}"
