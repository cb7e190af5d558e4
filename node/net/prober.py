"""Measurement of all links: regular pings, at once after changes, and probes.

One thread ticks, a few more wait for answers. A probe is sent only if no transfer shows a link's
rate, one at a time, for a hundredth of the time.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Thread
from typing import Final, Protocol

from fabric.hosting.clock import elapsed_s
from fabric.ids import NodeName
from fabric.net.interfaces import Interface
from fabric.net.link_estimate import ProbeBudget, was_away
from fabric.net.links import Address
from fabric.ports import Clock
from node.net.interfaces import INTERFACES_LISTING_S, MACHINE, Listing
from node.net.link_table import LinkTable
from node.net.probe import Measured

TICK_S: Final = 1.0
PINGS_AT_ONCE: Final = 4  # dead links take seconds each
STOP_S: Final = 10.0
_LOG = logging.getLogger(__name__)
Follow = Callable[[Sequence[Interface]], None]


class Measure(Protocol):
    """Measurement of a link: `node.net.probe.Caller.measure`."""

    def __call__(self, peer: NodeName, address: Address, probe_bytes: int = 0) -> Measured:
        """Measure one link; return failures as results."""
        ...


class LinkProber:
    """Prober of all links of a node, from `start` to `stop`."""

    def __init__(
        self,
        table: LinkTable,
        measure: Measure,
        clock: Clock,
        follow: Follow,
        listing: Listing = MACHINE,
        tick_s: float = TICK_S,
        elapsed_s: Callable[[], float] = elapsed_s,
    ) -> None:
        """Measure by `measure`; call `follow` with this machine's interfaces when they change."""
        self._table = table
        self._measure = measure
        self._clock = clock
        self._follow = follow
        self._listing = listing
        self._tick_s = tick_s
        self._elapsed_s = elapsed_s
        self._interfaces = listing.latest()
        self._list_at_s = clock.monotonic_s() + INTERFACES_LISTING_S
        self._budget = ProbeBudget()
        self._is_probing = False
        self._lock = Lock()
        self._under_way: set[tuple[NodeName, str, int]] = set()
        self._hurry = Event()
        self._is_stopping = False
        self._pool = ThreadPoolExecutor(PINGS_AT_ONCE, thread_name_prefix="link")
        self._thread = Thread(target=self._run, name="links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Measure now, since peers were added or have returned."""
        self._hurry.set()

    def stop(self) -> None:
        """Stop; a measurement under way ends by its deadline."""
        self._is_stopping = True
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        before = self._clock.monotonic_s(), self._elapsed_s()
        while not self._is_stopping:
            self._hurry.wait(self._tick_s)
            self._hurry.clear()
            now = self._clock.monotonic_s(), self._elapsed_s()
            was_asleep = was_away(now[0] - before[0], now[1] - before[1], self._tick_s)
            before = now
            try:
                self.look(was_asleep=was_asleep)
            except Exception:  # noqa: BLE001 - a failed round must not be the last
                _LOG.exception("cannot measure the links")

    def look(self, *, was_asleep: bool = False) -> None:
        """Start the measurements that are due, without waiting for them."""
        if self._is_stopping:
            return
        if was_asleep:
            _LOG.info("this machine was asleep; measuring its links again")
            self._table.expire_all()
        now_s = self._clock.monotonic_s()
        if was_asleep or now_s >= self._list_at_s:
            self._list_at_s = now_s + INTERFACES_LISTING_S
            self._relist()
        for peer, address in self._table.due():
            self._begin(peer, address)
        with self._lock:
            self._budget = self._budget.at(now_s)
            may_probe = self._budget.allows and not self._is_probing
            busy = frozenset(self._under_way)
        if may_probe and (due := self._table.due_probe(busy)) is not None:
            self._begin(*due)

    def _relist(self) -> None:
        interfaces = self._listing.refresh()
        if interfaces != self._interfaces:
            _LOG.info("this machine's addresses changed; measuring its links again")
            self._interfaces = interfaces
            self._follow(interfaces)
            self._table.expire_all()

    def _begin(self, peer: NodeName, address: Address, probe_bytes: int = 0) -> None:
        key = (peer, address.host, address.port)
        with self._lock:
            if key in self._under_way:
                return
            self._under_way.add(key)
            self._is_probing = self._is_probing or probe_bytes > 0
        self._pool.submit(self._look_at, peer, address, probe_bytes)

    def _look_at(self, peer: NodeName, address: Address, probe_bytes: int) -> None:
        seconds = 0.0
        try:
            measured = self._measure(peer, address, probe_bytes)
            seconds = measured.seconds
            self._note(peer, address, measured)
        except Exception:  # noqa: BLE001 - no caller would see it
            _LOG.exception("cannot measure a link to %s", peer)
        finally:
            with self._lock:
                self._under_way.discard((peer, address.host, address.port))
                if probe_bytes:
                    self._budget, self._is_probing = self._budget.spend(seconds), False

    def _note(self, peer: NodeName, address: Address, measured: Measured) -> None:
        interface = measured.interface
        device = interface.device if interface else ""
        if measured.rtt_s is None:
            self._table.record_failure(peer, address, measured.problem or "broken", device)
            return
        kind = interface.kind if interface else None
        self._table.record_answer(peer, address, measured.rtt_s, device, kind)
        if measured.moved_bytes:
            self._table.record_rate(peer, address, measured.moved_bytes, measured.seconds)
        elif measured.is_probe_unfinished:
            self._table.record_unfinished_probe(peer, address)
