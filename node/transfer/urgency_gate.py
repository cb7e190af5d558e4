"""Priority of urgent blocks on a link: senders of less urgent blocks pause between slices.

A sender waits at most TRANSFER_HOLD_S per slice, so it does not starve and its receiver does not
time out. A sender that makes no progress delays no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Final

from fabric.net.wire import Urgency
from node.limits import TRANSFER_HOLD_S

STUCK_S: Final = 0.5  # a sender whose slice takes longer does not use the link


class Sender:
    """Response being sent: its link, its urgency, and when it last made progress."""

    def __init__(self, link: str, urgency: Urgency, moved_s: float) -> None:
        self.link = link
        self.urgency = urgency
        self.moved_s = moved_s


class UrgencyGate:
    """Gate for all responses that one server is sending."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._changed = Condition()
        self._senders: set[Sender] = set()
        self._highest = Urgency.PREFETCH  # highest urgency of all senders

    @contextmanager
    def sending(self, link: str, urgency: Urgency) -> Iterator[Sender]:
        """Register a sender over `link` (this end's address) for the duration."""
        sender = Sender(link, urgency, self._now_s())
        with self._changed:
            self._senders.add(sender)
            self._highest = max(self._highest, urgency)
        try:
            yield sender
        finally:
            with self._changed:
                self._senders.discard(sender)
                urgencies = (other.urgency for other in self._senders)
                self._highest = max(urgencies, default=Urgency.PREFETCH)
                self._changed.notify_all()

    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._senders)

    def before_slice(self, sender: Sender) -> bool:
        """Wait at most TRANSFER_HOLD_S for more urgent blocks; return whether it had to wait."""
        if sender.urgency >= self._highest:  # the common case, without the cost of the lock
            sender.moved_s = self._now_s()
            return False
        with self._changed:
            must_wait = self._is_in_the_way(sender)
            if must_wait:
                self._changed.wait_for(lambda: not self._is_in_the_way(sender), TRANSFER_HOLD_S)
            sender.moved_s = self._now_s()
        return must_wait

    def _is_in_the_way(self, sender: Sender) -> bool:
        now_s = self._now_s()
        return any(
            other.urgency > sender.urgency
            and other.link == sender.link
            and now_s - other.moved_s < STUCK_S
            for other in self._senders
        )
