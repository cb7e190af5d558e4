"""How long agents have been idle, and how likely each is to come back.

Idle time grows by the steady clock, over restarts by `node.store.service_time`. Who comes from
another node begins anew.
"""

from fabric.ids import AgentKey
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from fabric.retention.reuse_probability import ReuseProbability


class UseLog:
    """The last turn of every agent of one node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reuse = ReuseProbability()
        self._seen: dict[AgentKey, tuple[float, float]] = {}  # used_s, steady s

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

    def idle_s(self, record: Manifest) -> float:
        """Return the seconds since the agent's last turn."""
        seen = self._seen.get(record.key)
        return self._clock.monotonic_s() - seen[1] if seen is not None else 0.0

    def reuse_probability(self, record: Manifest) -> float:
        return self._reuse.probability(record.tenant, record.revision)
