"""Prefetches: agents loaded before their next turn, by a call or by a hint of a request."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from fabric.control.node_calls import AgentView, PrefetchAgent
from fabric.errors import FabricError, RetryElsewhereError
from fabric.ids import AgentId, AgentKey, TenantId
from router.fleet.fleet import Fleet
from router.limits import GUESSES_MAX, PREFETCH_TASKS_MAX
from router.moves.copier import CopyReceipt
from router.moves.move_registry import MoveRegistry
from router.moves.replicas import Replicas
from router.moves.retries import as_client_error
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.prefetches")


class PrefetchRequests:
    """Requests to load agents into their owners' RAM, or to copy them to other nodes."""

    def __init__(
        self, fleet: Fleet, moves: MoveRegistry, replicas: Replicas, telemetry: Telemetry
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._replicas = replicas
        self._telemetry = telemetry
        self._hinted: set[asyncio.Task[None]] = set()
        self._guessed: set[asyncio.Task[None]] = set()

    async def load(self, key: AgentKey) -> AgentView:
        """Load an agent into its owner's memory; a turn that arrives meanwhile waits for it."""
        await self._fleet.membership.refresh(relist=True)
        await self._moves.wait_until_served(key)
        try:
            view = await self._ask(key)
        except FabricError:
            self._telemetry.note_copy("prefetch", 0, ok=False)
            raise
        self._telemetry.note_copy("prefetch", 0, ok=True)
        return view

    async def is_home(self, key: AgentKey, node: str) -> bool:
        """Return whether a node owns the agent; raise NotFoundError if the node is unknown."""
        await self._fleet.membership.refresh(relist=True)
        return self._fleet.require_node(node) == self._fleet.require_owner(key).node

    async def copy_to(self, key: AgentKey, to: str) -> CopyReceipt:
        """Copy an agent to the disk of another node, where it may be needed next."""
        return await self._replicas.replicate(key, to, kept=None)

    async def cancel(self, key: AgentKey) -> AgentView:
        await self._fleet.membership.refresh(relist=True)
        return await self._ask(key, cancel=True)

    def hint(self, tenant: TenantId, agents: Sequence[AgentId]) -> None:
        """Load agents in the background, if possible; failures are only logged."""
        for agent in agents:
            if len(self._hinted) >= PREFETCH_TASKS_MAX:
                return
            task = asyncio.create_task(self._load_hinted((tenant, agent)))
            self._hinted.add(task)
            task.add_done_callback(self._hinted.discard)

    def guess(self, key: AgentKey, on_begun: Callable[[], None]) -> None:
        """Load an agent that no client has named, unless its node refuses."""
        if len(self._guessed) >= GUESSES_MAX:
            self._telemetry.guesses.labels("refused").inc()
            return
        task = asyncio.create_task(self._load_guessed(key))
        on_begun()
        self._guessed.add(task)
        task.add_done_callback(self._guessed.discard)

    async def _load_guessed(self, key: AgentKey) -> None:
        if self._fleet.directory.owner(key) is None or self._moves.is_moving(key):
            return
        try:
            await self._ask(key, is_guess=True)
        except FabricError as error:
            self._telemetry.guesses.labels("refused").inc()
            _LOG.debug("an expected agent was not loaded: %s", error.code)

    async def close(self) -> None:
        tasks = [*self._hinted, *self._guessed]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_hinted(self, key: AgentKey) -> None:
        owner = self._fleet.directory.owner(key)
        if owner is None or (owner.view is not None and "hot" in owner.view.tiers):
            return
        try:
            await self.load(key)
        except FabricError as error:
            _LOG.info("a hinted agent was not loaded: %s", error.code)

    async def _ask(
        self, key: AgentKey, *, cancel: bool = False, is_guess: bool = False
    ) -> AgentView:
        owner = self._fleet.require_owner(key)
        call = PrefetchAgent(*key, owner.epoch, cancel, is_guess)
        try:
            return await self._fleet.link(owner.node).call(call, AgentView)
        except RetryElsewhereError as error:
            raise as_client_error(error) from None
