"""What was erased, on this node's disk: one small file per agent, below all models' folders.

Told by the router with each erasure, and again when this node has been away. Memory has all of
them even where the disk refuses: what counts is that the agents go.
"""

import logging
from collections.abc import Iterable
from threading import Lock
from typing import Final

from fabric.erasure import Tombstone, Tombstones, decode_tombstone, encode_tombstone, tombstone
from fabric.errors import CorruptDataError, StaleEpochError
from fabric.hashing import agent_digest
from fabric.ids import AgentId, TenantId
from fabric.limits import KIB
from fabric.ports import Clock
from node.posix_disk import DiskError, PosixDisk

DIRECTORY: Final = "erased"
_AGENTS: Final = "agents"
_FILE_BYTES_MAX: Final = 4 * KIB

_log = logging.getLogger(__name__)


class Erased:
    """The tombstones of one node; methods may be called from any thread."""

    def __init__(self, disk: PosixDisk, cluster_key: bytes, clock: Clock) -> None:
        """Load what the disk holds; raise DiskError if another process has it."""
        self._disk = disk
        self._cluster_key = cluster_key
        self._clock = clock
        self._lock = Lock()
        self._all = Tombstones()
        self._disk.recover()
        for leaf in self._disk.list_names(_AGENTS):
            self._load(leaf)
        self._remove(self._all.expire(clock.wall_s()))

    @property
    def fingerprint(self) -> int:
        """Tell whether two nodes, or a node and a router, know the same."""
        return self._all.fingerprint

    @property
    def all(self) -> tuple[Tombstone, ...]:
        """List all of them."""
        with self._lock:
            return tuple(self._all)

    def epoch_of(self, digest: str) -> int:
        """Return up to which epoch the agent of this digest is erased; 0: it is not."""
        return self._all.epoch_of(digest)

    def claim_epoch(self, tenant: TenantId, agent: AgentId, asked: int) -> int:
        """Return `asked`; for 0 the first epoch that an erased agent's name may be used at again.

        Raises StaleEpochError for an epoch that was erased: who asks for it was sent out before,
        and what it would be lifted to is given to another node.
        """
        floor = self.floor(tenant, agent)
        if 0 < asked <= floor:
            message = f"epoch {asked} of the agent was erased"
            raise StaleEpochError(message, code="erased")
        return asked or (floor + 1 if floor else 0)

    def floor(self, tenant: TenantId, agent: AgentId) -> int:
        """Return up to which epoch an agent is erased; 0: it is not."""
        if not len(self._all):
            return 0
        return self.epoch_of(agent_digest(self._cluster_key, tenant, agent))

    def note(self, tenant: TenantId, agent: AgentId, epoch: int, erased_s: float) -> Tombstone:
        """Remember an erasure durably; raise DiskError where that fails."""
        made = tombstone(self._cluster_key, tenant, agent, epoch, erased_s)
        with self._lock:
            news = self._all.merge([made], self._clock.wall_s())
            self._publish(news)
        return made

    def take(self, others: Iterable[Tombstone]) -> list[Tombstone]:
        """Take over what others know; return the news, saved as far as the disk allows."""
        with self._lock:
            self._remove(self._all.expire(self._clock.wall_s()))
            news = self._all.merge(others, self._clock.wall_s())
            try:
                self._publish(news)
            except DiskError as error:
                # The router tells them again after a restart.
                _log.warning("tombstones are in memory only: %s", error.reason)
        return news

    def close(self) -> None:
        """Let the folder go."""
        self._disk.close()

    def _publish(self, news: Iterable[Tombstone]) -> None:
        for item in news:
            self._disk.publish(f"{_AGENTS}/{item.agent}", [encode_tombstone(item)])

    def _remove(self, old: Iterable[Tombstone]) -> None:
        for item in old:
            try:
                self._disk.remove(f"{_AGENTS}/{item.agent}")
            except DiskError as error:
                _log.warning("an old tombstone stays: %s", error.reason)

    def _load(self, leaf: str) -> None:
        try:
            item = decode_tombstone(self._disk.read(f"{_AGENTS}/{leaf}", _FILE_BYTES_MAX))
        except (CorruptDataError, DiskError, FileNotFoundError) as error:
            # Other nodes have it, too: the router tells it again.
            _log.warning("a tombstone is damaged: %s", type(error).__name__)
            return
        if item.agent != leaf:
            _log.warning("a tombstone lies under another agent's name")
            return
        self._all.merge([item], self._clock.wall_s())
