"""Heads: a prompt's beginning is computed once, by one sequence, while others wait for it.

    leads       sequences that have had memory, until their turn is saved: they publish blocks
    followers   sequences without memory that wait for blocks which a lead computes or another node
                sends; and turns on other nodes to which such blocks are sent

No lead waits for memory, so followers cannot block each other. For a lead that is paused or ends,
followers wait only up to its last computed token; the first follower to start then becomes the
lead. Block names contain the tenant's salt, so no sequence follows another tenant's.
"""

import threading
from collections.abc import Iterable
from typing import Final

from fabric.limits import BLOCK_TOKENS
from node.engine.decode_step import emit_event
from node.engine.sequence import Awaited, Head, Sequence
from node.limits import HEAD_TOKENS_MIN, HEAD_WAIT_EXTRA_S, HEAD_WAIT_FACTOR

_NONE: Final[tuple[Sequence, ...]] = ()


class Heads:
    """Heads of one engine; used on its thread, except for `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards changes of the table
        self._leads: dict[bytes, tuple[Sequence, ...]] = {}  # by their first block's name
        self._remote: dict[Head, bool] = {}  # turns on other nodes, and whether a client waits

    def begin(self, sequence: Sequence) -> None:
        """Note that a sequence has its memory, and computes its prompt from now on."""
        head = sequence.head
        if head is None:
            return
        head.expected_tokens, head.computed_tokens = 0, None
        if not (head.leads and head.names):
            return
        with self._lock:
            leads = self._leads.get(head.names[0], _NONE)
            if sequence not in leads:
                self._leads[head.names[0]] = (*leads, sequence)

    def pause(self, sequence: Sequence) -> None:
        """Note that a sequence has stopped computing, for now or for ever."""
        if sequence.head is not None:
            sequence.head.computed_tokens = sequence.cache.tokens_count

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence whose turn was saved or has failed."""
        head = sequence.head
        if head is None or not head.names:
            return
        with self._lock:
            leads = self._leads.get(head.names[0], _NONE)
            remaining = tuple(other for other in leads if other is not sequence)
            if remaining:
                self._leads[head.names[0]] = remaining
            else:
                self._leads.pop(head.names[0], None)

    def follow(self, head: Head, *, is_urgent: bool) -> None:
        """Make leads publish the tokens that a turn on another node waits for, until `unfollow`."""
        with self._lock:
            self._remote[head] = is_urgent

    def unfollow(self, head: Head) -> None:
        with self._lock:
            self._remote.pop(head, None)

    def without_held(
        self, waiting: Iterable[Sequence], now_s: float, tokens_per_s: float
    ) -> list[Sequence]:
        """List the waiting sequences that need not wait; make the leads of the others publish.

        `tokens_per_s`: one prompt's speed beside those that are computed now; 0 if not measured.
        """
        for leads in self._leads.copy().values():
            for lead in leads:
                lead.is_awaited = False
        for remote, is_urgent in self._remote.copy().items():
            ready, end, best = self._best(remote)
            if best is not None and end > ready:
                self._request_publishing(best, end, is_urgent=is_urgent)
        return [s for s in waiting if not self._is_held(s, now_s, tokens_per_s)]

    def _is_held(self, sequence: Sequence, now_s: float, tokens_per_s: float) -> bool:
        head = sequence.head
        if head is None or not (head.waits and head.names):
            return False
        if head.coming_tokens > head.stored_tokens:
            head.expected_tokens = head.coming_tokens - head.stored_tokens
            return not _is_too_late(head, head.coming_tokens, now_s, tokens_per_s)
        ready, end, best = self._best(head)
        head.has_grown = head.has_grown or ready > head.stored_tokens
        head.expected_tokens = 0
        if best is None or end < ready + HEAD_TOKENS_MIN:
            return False
        if _is_too_late(head, end, now_s, tokens_per_s):
            return False
        head.expected_tokens = end - ready
        head.has_grown = True
        self._request_publishing(best, end, is_urgent=sequence.is_urgent)
        return True

    def _best(self, head: Head) -> tuple[int, int, Sequence | None]:
        """Return a head's ready tokens, and the end and lead of its longest part in progress."""
        ready, end, best = head.stored_tokens, 0, None
        for lead in self._leads.get(head.names[0], _NONE):
            other = lead.head
            if other is None or not other.leads:
                continue
            common = head.common_tokens(other)
            ready = max(ready, min(common, other.published_tokens))
            reached = _resumable_tokens(lead, other, common)
            if reached > end:
                end, best = reached, lead
        return ready, end, best

    def _request_publishing(self, lead: Sequence, end: int, *, is_urgent: bool) -> None:
        """Make a lead publish its first `end` tokens, with the urgency of the waiting turn."""
        head = lead.head
        assert head is not None, "a lead has a head"
        lead.is_awaited = lead.is_awaited or is_urgent
        if head.computed_tokens is None:
            _stop_at(lead, head, end)
        if end > head.awaited_tokens:
            head.awaited_tokens = end
            if head.computed_tokens is None:
                emit_event(lead, Awaited())


def _resumable_tokens(lead: Sequence, head: Head, common: int) -> int:
    """Return how many of the first `common` tokens can be resumed once a lead has published."""
    computed = head.computed_tokens
    if computed is not None:
        part = 1 if head.shares_parts else BLOCK_TOKENS
        common = min(common, computed // part * part)
    if not head.has_states or (computed is None and common > lead.cache.tokens_count):
        return common
    stops = (stop for stop in lead.stops if stop <= common and stop % BLOCK_TOKENS == 0)
    return max(stops, default=0)


def _stop_at(lead: Sequence, head: Head, end: int) -> None:
    """Make a lead keep its recurrent state at `end`, if it has one and is not there yet."""
    if not head.has_states or lead.awaited_tokens is not None or end in lead.stops:
        return
    lead.stops = tuple(sorted((*lead.stops, end)))


def _is_too_late(head: Head, end: int, now_s: float, tokens_per_s: float) -> bool:
    """Return whether a follower has waited longer than computing the head should take."""
    if head.waits_since_s is None:
        head.waits_since_s = now_s
    if tokens_per_s <= 0:
        return False
    predicted_s = (end - head.stored_tokens) / tokens_per_s  # at the present speed
    limit_s = HEAD_WAIT_EXTRA_S + HEAD_WAIT_FACTOR * predicted_s
    head.waits = now_s - head.waits_since_s < limit_s
    return not head.waits
