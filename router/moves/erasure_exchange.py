"""Exchange of tombstones between the router and nodes that join or return.

    a node joins or returns ──▶ it gets all tombstones, and reports its own, before its lease begins

So an erasure outlives the router, and no node serves what was erased while it was away. A standby
reads the tombstones of present nodes, and leaves it to the active router to send them others:
an erasure that is under way there counts what it removes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from fabric.control.erasure_calls import KnownErasures, ShareErasures
from fabric.control.node_calls import NodeView
from fabric.errors import RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.kvcache.hashing import agent_digest
from fabric.ports import Clock
from fabric.record.tombstone import Tombstones
from router.fleet.membership import NodeNames
from router.fleet.node_client import NodeLink
from router.limits import ERASURE_DIGESTS_MAX, SUSPECT_S
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.erasures")
HEARD_POLL_S = 0.02
ERASURE_REPLY_WAIT_S = 0.5  # below a heartbeat, which repeats the call


class ErasureExchange:
    """All known tombstones, and which nodes have them."""

    def __init__(
        self,
        cluster_key: bytes,
        clock: Clock,
        telemetry: Telemetry,
        is_active: Callable[[], bool],
    ) -> None:
        self.known = Tombstones()
        self._clock = clock
        self._is_active = is_active
        self._telemetry = telemetry
        # Cached, as it is needed for every agent of every list.
        self._digest = lru_cache(maxsize=ERASURE_DIGESTS_MAX)(
            lambda key: agent_digest(cluster_key, *key)
        )
        self._reporters: set[NodeName] = set()
        # Calls in progress, by node and agent's digest: their receipts alone count removals.
        self._erasing: set[tuple[NodeName, str]] = set()
        # By node: the fingerprint of the tombstones that it last reported.
        self._shared: dict[NodeName, int] = {}
        self._since_s = clock.monotonic_s()

    def floor(self, key: AgentKey) -> int:
        """Return the epoch up to which an agent was erased, as far as nodes have reported."""
        return self.known.epoch_of(self._digest(key)) if self.known else 0

    def is_caught_up(self, view: NodeView) -> bool:
        """Return whether a node's tombstones equal those it should have, or a standby has them."""
        if not self._is_active() and view.erased == self._shared.get(view.name):
            return True
        return view.erased in {self.known.fingerprint, self._tombstones_for(view.name).fingerprint}

    async def catch_up(
        self, link: NodeLink, view: NodeView, others: NodeNames, *, is_present: bool
    ) -> None:
        """Exchange tombstones with a node; raise FabricError if that fails.

        At the router's start, wait a moment for the other nodes, which may have more of them.
        """
        if is_present and not self._is_active():
            await self._send(link, Tombstones())
            return
        await self._share(link, view.erased)
        self._reporters.add(link.name)
        await self._await_others(others)
        await self._share(link, self._shared[link.name])

    @contextmanager
    def withhold_tombstone(self, node: NodeName, key: AgentKey) -> Iterator[None]:
        """Leave an agent's tombstone out of exchanges with a node while its erasure runs there."""
        name = (node, self._digest(key))
        self._erasing.add(name)
        try:
            yield
        finally:
            self._erasing.discard(name)

    async def _share(self, link: NodeLink, fingerprint: int) -> None:
        if fingerprint != self.known.fingerprint:
            await self._send(link, self._tombstones_for(link.name))
        else:
            self._shared[link.name] = fingerprint

    async def _send(self, link: NodeLink, erased: Tombstones) -> None:
        """Send tombstones to a node, and learn all that it has."""
        answer = await link.call(ShareErasures(tuple(erased)), KnownErasures)
        self.known.merge(answer.erased)
        if answer.agents_removed:
            self._telemetry.late_erasures.inc(answer.agents_removed)
            _LOG.info("node %s removed %d erased agents", link.name, answer.agents_removed)
        reported = Tombstones()
        reported.merge(answer.erased)
        self._shared[link.name] = reported.fingerprint

    def _tombstones_for(self, node: NodeName) -> Tombstones:
        """Return the known tombstones except those of erasures in progress on the node."""
        erasing = {agent for name, agent in self._erasing if name == node}
        if not erasing:
            return self.known
        shared = Tombstones()
        shared.merge(item for item in self.known if item.agent not in erasing)
        return shared

    async def _await_others(self, others: NodeNames) -> None:
        """Wait for the tombstones of all nodes; raise RetryLaterError if that takes too long."""
        deadline_s = self._clock.monotonic_s() + ERASURE_REPLY_WAIT_S
        while not self._have_all_reported(others()):
            if self._clock.monotonic_s() >= deadline_s:
                message = "other nodes have not reported their erasures yet; retry later"
                raise RetryLaterError(message, code="not_heard")
            await asyncio.sleep(HEARD_POLL_S)

    def _have_all_reported(self, nodes: tuple[NodeName, ...]) -> bool:
        is_started = self._clock.monotonic_s() - self._since_s >= SUSPECT_S
        is_complete = len(self._reporters) >= len(nodes) and self._reporters.issuperset(nodes)
        return is_started or is_complete
