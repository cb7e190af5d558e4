"""Numbered changes of a router's own memory, which a standby copies before they are acknowledged.

note() ──▶ the standby's waiting request is answered ──▶ its next request acknowledges
settle() waits for that, for SHADOW_WAIT_S at most, and not at all without a standby
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from router.fresh_ids import fresh_name
from router.limits import SHADOW_ABSENT_S, SHADOW_REMOVALS_MAX, SHADOW_WAIT_S

_LOG = logging.getLogger("macfabric.router.shadow")


@dataclass(frozen=True, slots=True)
class Changes:
    """Names changed and removed since a version; `is_whole`: all other names are removed, too."""

    names: tuple[str, ...]
    gone: tuple[str, ...]
    is_whole: bool


class ChangeLog:
    """Numbers of changes of one router's process, and how far a standby has copied them."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.life = fresh_name("")
        self.version = 0
        self.unshared_count = 0  # answers that did not wait for a standby that was present
        self._now_s = now_s
        self._versions: dict[str, int] = {}  # by name, the latest last
        self._gone: dict[str, int] = {}
        self._gone_since = 0  # earlier removals are forgotten
        self._copied = 0  # all up to this version are at a standby
        self._requested_s = float("-inf")
        self._news = asyncio.Event()
        self._acknowledged = asyncio.Event()

    @property
    def is_followed(self) -> bool:
        """Return whether a standby sent a request within SHADOW_ABSENT_S."""
        return self._now_s() - self._requested_s < SHADOW_ABSENT_S

    def note(self, name: str | None = None) -> None:
        """Number a change of what `name` names, or of the runs' files."""
        self.version += 1
        if name is not None:
            self._versions.pop(name, None)
            self._gone.pop(name, None)
            self._versions[name] = self.version
        self._news.set()

    def note_gone(self, name: str) -> None:
        """Number a removal."""
        self.version += 1
        self._versions.pop(name, None)
        self._gone[name] = self.version
        if len(self._gone) > SHADOW_REMOVALS_MAX:
            oldest = next(iter(self._gone))
            self._gone_since = self._gone.pop(oldest)
        self._news.set()

    def since(self, life: str, version: int) -> Changes:
        """Return the changes after a version of this life, or everything."""
        if life != self.life or version < self._gone_since:
            return Changes(tuple(self._versions), (), is_whole=True)
        names = tuple(name for name, at in self._versions.items() if at > version)
        gone = tuple(name for name, at in self._gone.items() if at > version)
        return Changes(names, gone, is_whole=False)

    def version_of(self, name: str) -> int:
        """Return the version of a name's last change; 0 if it is gone."""
        return self._versions.get(name, 0)

    def acknowledge(self, life: str, version: int) -> None:
        """Record a standby's request: it has everything up to `version`."""
        self._requested_s = self._now_s()
        if life == self.life:
            self._copied = max(self._copied, version)
            self._acknowledged.set()

    async def wait_for_news(self, life: str, version: int, limit_s: float) -> None:
        """Wait until there is a change after a version."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while life == self.life and self.version <= version:
                    self._news.clear()
                    await self._news.wait()

    async def settle(self) -> None:
        """Wait until a standby has all changes so far; log a standby that does not copy them."""
        version = self.version
        if not self.is_followed or self._copied >= version:
            return
        try:
            async with asyncio.timeout(SHADOW_WAIT_S):
                while self._copied < version:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        except TimeoutError:
            self.unshared_count += 1
            self._requested_s = float("-inf")
            _LOG.warning("the standby does not copy responses and runs: continuing without it")
