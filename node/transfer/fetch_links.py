"""The links of one fetch: their speeds, and which rest or are excluded after a failure.

The link book gives the order of the first tries. A failed link rests, twice as long each time, and
is then tried by one stream. A link to another node, key or version is never tried again.
"""

from collections.abc import Sequence
from typing import Final

from fabric.errors import FabricError, RetryLaterError
from fabric.ids import NodeName
from fabric.limits import KIB, MIB
from fabric.net.links import Address
from node.limits import TRANSFER_LINKS_MAX
from node.net.link_reservations import LinkBook
from node.net.peer import FetchTimeouts

LINK_SHARE_MIN: Final = 0.08  # of the fastest link's speed: a slower one is a fallback
# Fewer do not count: a peer must not stall a fetch by single bytes.
PROGRESS_BYTES: Final = 64 * KIB
MEASURED_BYTES_MIN: Final = 1 * MIB  # fewer measure buffers rather than the link
OBSERVE_S: Final = 2.0
_BRISK_S: Final = 0.02


class FetchLink:
    """One address of the peer, with its speed and failures in this fetch."""

    def __init__(self, address: Address, expected: float) -> None:
        """Assume `expected` bytes per second until the speed is measured."""
        self.address = address
        self.expected = expected
        self.streams = 0
        self.is_fallback = False  # used only if better ones fail
        self.failures = 0  # consecutive failures
        self.failed_count = 0
        self.rests_until_s = 0.0
        self.dialing = 0
        self.moved_bytes = 0
        self.moved_s = 0.0  # time of the last bytes
        self._busy = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._observed = (0, 0.0)

    @property
    def is_awaited(self) -> bool:
        """Return whether streams still connecting over the link are expected to help."""
        return not self.is_fallback and not self.failures

    def bytes_per_s(self, now_s: float) -> float:
        """Return the measured speed, or the expected one."""
        busy_s = self.busy_s(now_s)
        if self.moved_bytes < MEASURED_BYTES_MIN or busy_s < _BRISK_S:
            return self.expected
        return self.moved_bytes / busy_s

    def stream_bytes_per_s(self, now_s: float) -> float:
        return max(1.0, self.bytes_per_s(now_s) / max(1, self.streams))

    def busy_s(self, now_s: float) -> float:
        """Return the seconds during which some stream waited for bytes."""
        return self._busy_s + (now_s - self._busy_since_s if self._busy else 0.0)

    def begin(self, now_s: float) -> None:
        """Count one more stream that waits for bytes."""
        if not self._busy:
            self._busy_since_s = now_s
        self._busy += 1

    def end(self, now_s: float) -> None:
        """Count one stream fewer that waits for bytes."""
        self._busy -= 1
        if not self._busy:
            self._busy_s += now_s - self._busy_since_s

    def take_unobserved(self, now_s: float) -> tuple[int, float]:
        """Return the bytes and busy seconds since the last call."""
        before_bytes, before_s = self._observed
        self._observed = (self.moved_bytes, self.busy_s(now_s))
        return self._observed[0] - before_bytes, self._observed[1] - before_s


class FetchLinks:
    """All links of one fetch; the fetch's lock is held around every call."""

    def __init__(
        self,
        peer: NodeName,
        addresses: Sequence[Address],
        book: LinkBook,
        timeouts: FetchTimeouts,
        now_s: float,
    ) -> None:
        self._peer = peer
        self._book = book
        self._timeouts = timeouts
        self._refusal: FabricError | None = None
        self._last_error: Exception | None = None
        self._begun_s = self._observed_s = now_s
        ranked = book.rank(peer, addresses)[:TRANSFER_LINKS_MAX]
        self.links = [FetchLink(address, max(1.0, speed)) for address, speed in ranked]

    def spread(self, streams: int, most: int, *, striped: bool) -> list[FetchLink]:
        """Choose a link for each stream; links too slow to help get one stream as a fallback.

        Links share the `streams`; each gets at least one, unless that exceeds `most`.
        """
        if not self.links:
            message = "the peer has no address"
            raise RetryLaterError(message)
        fastest = max(link.expected for link in self.links)
        worth = [x for x in self.links if striped and x.expected >= LINK_SHARE_MIN * fastest]
        worth = (worth or self.links[:1])[:most]
        each = max(1, streams // len(worth))
        chosen = [link for link in worth for _ in range(each)]
        for link in self.links:
            if link not in worth:
                link.is_fallback = True
                chosen.append(link)
        for link in chosen:
            link.streams += 1
        return chosen

    def may_dial(self, link: FetchLink, now_s: float) -> bool:
        """Return whether a stream may try `link` now; after a failure only one stream does.

        A fallback link waits until the better ones fail or all stall.
        """
        if link.is_fallback and self._is_well(now_s):
            return False
        if not link.failures:
            return True
        return now_s >= link.rests_until_s and not link.dialing

    def _is_well(self, now_s: float) -> bool:
        moved_s = max([self._begun_s, *(link.moved_s for link in self.links)])
        is_stuck = now_s - moved_s > self._timeouts.silence_s
        return not is_stuck and any(x.failures == 0 and not x.is_fallback for x in self.links)

    def failed(self, link: FetchLink, error: Exception, now_s: float) -> None:
        link.failures += 1
        link.failed_count += 1
        doubled = self._timeouts.pause_s * 2.0 ** min(link.failures - 1, 16)
        link.rests_until_s = now_s + min(doubled, self._timeouts.pause_max_s)
        self._last_error = error
        link.take_unobserved(now_s)  # earlier bytes do not show its present speed
        self._book.failed(self._peer, link.address)

    def exclude(self, link: FetchLink, refusal: FabricError) -> None:
        """Stop using `link`; raise `refusal` once no link is left."""
        self._refusal = self._refusal or refusal
        self.links = [other for other in self.links if other is not link]
        self._book.failed(self._peer, link.address)

    def moved(self, link: FetchLink, count_bytes: int, now_s: float) -> None:
        """Count verified bytes."""
        link.moved_bytes += count_bytes
        link.moved_s = now_s

    def error_if_exhausted(self) -> FabricError | None:
        """Return the error if no link can be tried again, or None."""
        if not self.links:
            return self._refusal or RetryLaterError("the peer has no address left")
        if any(link.failures < self._timeouts.rounds for link in self.links):
            return None
        message = f"{self._peer} sends nothing over any of its addresses ({self._last_error})"
        return RetryLaterError(message)

    def report(self, now_s: float, *, last: bool = False) -> None:
        """Report each link's bytes to the link book, from time to time and at the end."""
        if not last and now_s - self._observed_s < OBSERVE_S:
            return
        self._observed_s = now_s
        for link in self.links:
            moved_bytes, seconds = link.take_unobserved(now_s)
            if moved_bytes >= MEASURED_BYTES_MIN and seconds > 0:
                self._book.observe(self._peer, link.address, moved_bytes, seconds)
