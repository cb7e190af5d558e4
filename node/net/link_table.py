"""All links of this node with their measurements: the link book of transfers.

Thread-safe, bounded, and without any I/O: `node/net/prober.py` measures.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from fabric.ids import NodeName
from fabric.limits import ADDRESSES_MAX, PEERS_MAX
from fabric.net import link_estimate
from fabric.net.link_estimate import RESTING_BYTES_PER_S, LinkEstimate
from fabric.net.links import Address, LinkKind, LinkView, PeerNode, nominal_bytes_per_s, slower_kind
from fabric.ports import Clock
from node.limits import LINK_RATE_CHANGE_MIN, LINK_RESEND_S, LINK_RTT_CHANGE_MIN, LINKS_REPORTED_MAX

LINKS_MAX: Final = PEERS_MAX * ADDRESSES_MAX
Key = tuple[NodeName, str, int]


@dataclass(slots=True)
class _Link:
    peer: NodeName
    address: Address
    estimate: LinkEstimate
    device: str = ""
    kind: LinkKind = LinkKind.OTHER
    problem: str | None = None
    is_met: bool = False  # listed by the router, not only named by an offer
    shown: LinkView | None = None  # view at the last counted change
    shown_s: float = 0.0  # time of that change
    changed: int = 0  # number of that change


@dataclass(frozen=True, slots=True)
class LinkChanges:
    """Links that changed since a router's last list, and the number of the last change."""

    number: int
    has_all: bool  # links that are not among them are gone
    links: tuple[LinkView, ...]


class LinkTable:
    """Table of measured links; implements `node.net.link_reservations.LinkBook`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._links: dict[Key, _Link] = {}  # in order of last use
        self._peers: dict[NodeName, PeerNode] = {}
        self._moved_s: float | None = None
        self._changes = 1  # changes of links that routers are sent
        self._removed = 1  # the last change that removed one

    # --- the LinkBook ------------------------------------------------------------------------

    def rank(self, peer: NodeName, addresses: Sequence[Address]) -> Sequence[tuple[Address, float]]:
        """Return all addresses: working ones by expected bytes/s, then failed ones."""
        with self._lock:
            links = [(a, self._link(peer, a).estimate) for a in dict.fromkeys(addresses)]
        works = [(a, e.expected_bytes_per_s) for a, e in links if not e.failures]
        broken = sorted((pair for pair in links if pair[1].failures), key=lambda p: p[1].failures)
        if not works:  # then only their speeds are known
            return [(a, e.expected_bytes_per_s) for a, e in broken]
        works.sort(key=lambda pair: -pair[1])
        return [*works, *((a, RESTING_BYTES_PER_S) for a, _ in broken)]

    def observe(self, peer: NodeName, address: Address, moved_bytes: int, seconds: float) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._moved_s = now_s
            link = self._link(peer, address)
            link.estimate = link_estimate.with_transfer(link.estimate, moved_bytes, seconds, now_s)
            link.problem = None

    def failed(self, peer: NodeName, address: Address) -> None:
        self.record_failure(peer, address, "broken")

    # --- the prober --------------------------------------------------------------------------

    def set_peers(self, peers: Sequence[PeerNode]) -> None:
        """Replace the known peers; new and changed addresses are tried at once."""
        with self._lock:
            before, self._peers = self._peers, {p.name: p for p in peers}
            named = {(p.name, a.host, a.port) for p in peers for a in p.addresses}
            if any(link.is_met for key, link in self._links.items() if key not in named):
                self._changes = self._removed = self._changes + 1
            self._links = {key: link for key, link in self._links.items() if key in named}
            for peer in peers:
                old = before.get(peer.name)
                for address in peer.addresses:
                    link = self._link(peer.name, address)
                    if address.speed_mbit != link.address.speed_mbit:
                        link.estimate = link_estimate.with_nominal_rate(
                            link.estimate,
                            nominal_bytes_per_s(address),
                            is_reported=address.speed_mbit > 0,
                        )
                    link.address, link.is_met = address, True
                    if old != peer:
                        link.estimate = link_estimate.with_checks_due(link.estimate)

    def expire_all(self) -> None:
        """Make a ping of every link due: this machine woke up, or its addresses changed."""
        with self._lock:
            for link in self._links.values():
                link.estimate = link_estimate.with_checks_due(link.estimate)

    def due(self) -> list[tuple[NodeName, Address]]:
        """Return the links to ping now; each is returned once."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            links = [
                link
                for link in self._links.values()
                if link.is_met and link_estimate.ping_due(link.estimate, now_s)
            ]
            for link in links:
                link.estimate = link_estimate.with_ping_sent(link.estimate, now_s)
        return [(link.peer, link.address) for link in links]

    def due_probe(self, busy: Container[Key] = ()) -> tuple[NodeName, Address, int] | None:
        """Return the link to probe next, none of `busy`, and the bytes of the probe."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._moved_s is not None and now_s - self._moved_s < link_estimate.QUIET_S:
                return None  # a transfer is under way: it measures, and has priority
            for key, link in self._links.items():
                if (
                    key not in busy
                    and link.is_met
                    and link_estimate.probe_due(link.estimate, now_s)
                ):
                    link.estimate = link_estimate.with_probe_sent(link.estimate, now_s)
                    return link.peer, link.address, link_estimate.probe_bytes(link.estimate)
        return None

    def record_answer(
        self, peer: NodeName, address: Address, rtt_s: float, device: str, kind: LinkKind | None
    ) -> None:
        """Record a ping answered through `device` of this machine, a link of `kind`."""
        with self._lock:
            link = self._link(peer, address)
            now_s = self._clock.monotonic_s()
            link.estimate = link_estimate.with_round_trip(link.estimate, rtt_s, now_s)
            link.device, link.problem = device, None
            link.kind = address.kind if kind is None else slower_kind(address.kind, kind)

    def record_rate(
        self, peer: NodeName, address: Address, moved_bytes: int, seconds: float
    ) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            link = self._link(peer, address)
            link.estimate = link_estimate.with_probe(link.estimate, moved_bytes, seconds, now_s)

    def record_unfinished_probe(self, peer: NodeName, address: Address) -> None:
        """Record a probe that the peer refused or that received nothing; it is repeated soon."""
        with self._lock:
            link = self._link(peer, address)
            link.estimate = link_estimate.with_unfinished_probe(link.estimate)

    def record_failure(
        self, peer: NodeName, address: Address, problem: str, device: str | None = None
    ) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            link = self._link(peer, address)
            link.estimate = link_estimate.with_failure(link.estimate, now_s)
            link.problem = problem
            if device is not None:
                link.device = device

    # --- the heartbeat -----------------------------------------------------------------------

    def views(self) -> tuple[LinkView, ...]:
        """Return views of the links to every known peer, sorted by peer; bounded."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            met = [link for link in self._links.values() if link.is_met]
            views = [_view(link, now_s) for link in met[-LINKS_REPORTED_MAX:]]
        return tuple(sorted(views, key=lambda view: (view.peer, view.host)))

    def changes_after(self, change: int) -> LinkChanges:
        """Return the links that changed after `change`; all if one was removed since then.

        Measurements vary: only what matters to a choice between links counts as a change.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            met = [link for link in self._links.values() if link.is_met][-LINKS_REPORTED_MAX:]
            stalest = min(met, key=lambda link: link.shown_s, default=None)
            for link in met:
                view = _view(link, now_s)
                # One at a time is sent again for its age, so that no heartbeat is long.
                is_stale = link is stalest and now_s - link.shown_s >= LINK_RESEND_S
                if link.shown is None or is_stale or _has_changed(link.shown, view):
                    self._changes += 1
                    link.shown, link.shown_s, link.changed = view, now_s, self._changes
            has_all = not self._removed <= change <= self._changes
            links = [link for link in met if has_all or link.changed > change]
            views = tuple(_view(link, now_s) for link in links)
            return LinkChanges(self._changes, has_all, views)

    def _link(self, peer: NodeName, address: Address) -> _Link:
        key = (peer, address.host, address.port)
        link = self._links.pop(key, None)
        nominal = float(nominal_bytes_per_s(address))
        if link is None:
            estimate = LinkEstimate(nominal, is_nominal_reported=address.speed_mbit > 0)
            link = _Link(peer, address, estimate, kind=address.kind)
            if len(self._links) >= LINKS_MAX:
                self._forget_one()
        self._links[key] = link
        return link

    def _forget_one(self) -> None:
        unmet = (key for key, link in self._links.items() if not link.is_met)
        del self._links[next(unmet, None) or next(iter(self._links))]
        self._changes = self._removed = self._changes + 1


def _has_changed(old: LinkView, new: LinkView) -> bool:
    """Return whether a link differs enough from its last sent view."""
    if (old.kind, old.device, old.peer_device) != (new.kind, new.device, new.peer_device):
        return True
    if (old.reachable, old.problem) != (new.reachable, new.problem):
        return True
    return _has_moved(old.bytes_per_s, new.bytes_per_s, LINK_RATE_CHANGE_MIN) or _has_moved(
        old.rtt_s, new.rtt_s, LINK_RTT_CHANGE_MIN
    )


def _has_moved(old: float | None, new: float | None, share: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) > share * old


def _view(link: _Link, now_s: float) -> LinkView:
    estimate, address = link.estimate, link.address
    return LinkView(
        peer=link.peer,
        host=address.host,
        port=address.port,
        kind=link.kind,
        device=link.device,
        peer_device=address.device,
        reachable=estimate.is_reachable,
        problem=link.problem if estimate.failures else None,
        rtt_s=estimate.rtt_s,
        bytes_per_s=estimate.bytes_per_s,
        age_s=None if estimate.answered_s is None else now_s - estimate.answered_s,
        rate_age_s=None if estimate.measured_s is None else now_s - estimate.measured_s,
    )
