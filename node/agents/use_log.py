"""How long agents have been idle, and how likely each is to come back.

Idle time grows by the steady clock, over restarts by `node.store.service_time`. Who comes from
another node begins anew. Where a client said for how long it will come back, its agent counts as
just used until then: a word of this process only, which a restart or a move forgets.
"""

from math import inf
from typing import Final

from fabric.ids import AgentKey
from fabric.limits import RETAIN_S_MAX
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from fabric.retention.reuse_probability import ReuseProbability

PROMISED_REUSE: Final = 0.95  # that a client who said so comes back


class UseLog:
    """The last turn of every agent of one node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reuse = ReuseProbability()
        self._seen: dict[AgentKey, tuple[float, float]] = {}  # used_s, steady s
        self._retained_s: dict[AgentKey, float] = {}  # until when, steady s

    def recover(self, record: Manifest, idle_s: float) -> None:
        """Take in a record that was stored when this process began."""
        since_s = self._clock.monotonic_s() - idle_s
        self._seen[record.key] = (record.used_s, since_s)
        self._reuse.note_all(record.tenant, record.revision)

    def note(self, record: Manifest) -> None:
        """Take in a record that may tell of a turn."""
        key, now_s = record.key, self._clock.monotonic_s()
        seen = self._seen.get(key)
        if seen is None:
            self.recover(record, 0.0)
        elif seen[0] != record.used_s:
            self._seen[key] = (record.used_s, now_s)
            self._reuse.note(record.tenant, record.revision)

    def forget(self, record: Manifest) -> None:
        """Drop an agent; what was learned of its tenant's habits stays."""
        self._seen.pop(record.key, None)
        self._retained_s.pop(record.key, None)

    def retain(self, key: AgentKey, retain_s: float) -> None:
        """Note at a turn's end for how long its client will come back; 0: it did not say."""
        self._retained_s.pop(key, None)
        if retain_s > 0:
            self._retained_s[key] = self._clock.monotonic_s() + min(retain_s, RETAIN_S_MAX)

    def idle_s(self, record: Manifest) -> float:
        """Return the seconds since the agent's last turn, or since it need not be retained."""
        seen = self._seen.get(record.key)
        if seen is None:
            return 0.0
        since_s = max(seen[1], self._retained_s.get(record.key, -inf))
        return max(0.0, self._clock.monotonic_s() - since_s)

    def reuse_probability(self, record: Manifest) -> float:
        learned = self._reuse.probability(record.tenant, record.revision)
        is_promised = self._clock.monotonic_s() < self._retained_s.get(record.key, 0.0)
        return max(learned, PROMISED_REUSE) if is_promised else learned
