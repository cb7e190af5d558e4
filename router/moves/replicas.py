"""Replicas of agents on other nodes, updated after their turns at lowest priority.

    sweep   agents that changed, with fewer replicas than `router.replicas` or with stale ones
    copy    one at a time, and none while an agent is being moved

What is due follows from the nodes' reports: no turn queues a copy, a lost router loses nothing,
and many turns between two sweeps make one copy. A replica is never served as current: the node
that takes an agent over matches the prompt against its cache.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from itertools import islice

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import DropReplica, KeepReplica
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet import snapshots
from router.fleet.directory import Holding, applied_forgets, settings_fingerprint
from router.fleet.fleet import Fleet
from router.fleet.membership import Member
from router.limits import (
    EVICTED_REPLICA_RETRY_S,
    REPLICA_RETRY_S,
    REPLICAS_CHECKED_MAX,
    REPLICAS_CHECKED_PER_STEP,
    REPLICAS_WAITING_MAX,
)
from router.moves.copier import CopyReceipt, copy_agent
from router.moves.move_registry import MoveRegistry
from router.moves.retries import best_effort_call
from router.placement.agent_moves import routes
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.replicas")


class Replicas:
    """Replicas that clients request, and as many for every agent as the settings demand."""

    def __init__(
        self,
        fleet: Fleet,
        moves: MoveRegistry,
        telemetry: Telemetry,
        count: int,
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._telemetry = telemetry
        self._count = count
        self._copying: dict[AgentKey, asyncio.Task[CopyReceipt]] = {}
        self._exclusive: Counter[AgentKey] = Counter()  # agents of which no copy may be made
        self._changing: Counter[AgentKey] = Counter()  # those whose settings are being changed
        self._rest_until_s: dict[AgentKey, float] = {}
        # Turn last copied to each node, until when: a full disk evicts one replica for the next.
        # The oldest first.
        self._copied: OrderedDict[tuple[AgentKey, NodeName], tuple[object, float]] = OrderedDict()
        self._changed: dict[AgentKey, None] = {}  # agents for which a copy may be due
        self._unmet: dict[AgentKey, None] = {}  # those with too few nodes for their copies
        self._has_copies = False  # whether any agent ever had one
        self._node_states: dict[NodeName, object] = {}
        fleet.directory.follow(self._note)

    async def replicate(self, key: AgentKey, to: str, *, kept: bool | None) -> CopyReceipt:
        """Copy an agent to a node now, and if `kept` after its turns, too (None: as before)."""
        await self._fleet.membership.refresh(relist=True)
        await self._moves.wait_until_served(key)
        owner = self._fleet.require_owner(key)
        target = self._fleet.require_accepting(to)
        if owner.node == target:
            message = f"{target} owns agent {key[1]}: choose another node for the copy"
            raise ConflictError(message, code="owner_there", param="to")
        task = self._start(key, target, kept=kept)
        await asyncio.wait([task])  # it continues if the caller is cancelled
        if task.cancelled():
            if key in self._changing:
                message = f"the settings of agent {key[1]} changed while it was copied: try again"
                raise RetryLaterError(message, code="agent_changing")
            message = f"agent {key[1]} was erased while it was copied"
            raise ConflictError(message, code="erased")
        return task.result()

    @asynccontextmanager
    async def changing_settings(self, key: AgentKey) -> AsyncIterator[None]:
        """Keep copies from being made while the agent's settings change."""
        self._changing[key] += 1
        try:
            async with self.exclusive(key):
                yield
        finally:
            self._changing[key] -= 1
            self._changing += Counter()

    @asynccontextmanager
    async def exclusive(self, key: AgentKey) -> AsyncIterator[None]:
        """Cancel the agent's copy in progress and let none start, for an erasure or a change."""
        self._exclusive[key] += 1
        try:
            task = self._copying.get(key)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            yield
        finally:
            self._exclusive[key] -= 1
            self._exclusive += Counter()  # zeros go

    async def refresh(self, key: AgentKey, copy: Holding) -> None:
        """Renew a replica; the caller is in `exclusive`, which keeps other copies from starting."""
        await self._copy(key, copy.node, kept=None, background=True)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._fleet.membership.heartbeat_s)
            await self.sweep()

    async def close(self) -> None:
        tasks = list(self._copying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sweep(self) -> None:
        """Make all copies that are due, one after the other.

        Only agents are looked at whose holdings or nodes changed since nothing was due for them.
        """
        self._note_elapsed()
        await self._note_nodes()
        if not self._changed:
            return
        due, stale = await self._all_due()
        for key, copy in stale:
            if key not in self._copying and key not in self._exclusive:
                await self._forget_in_copy(key, copy)
        for key, target in due:
            if not self._moves.is_idle:
                return  # moves go first: a client waits for them
            if key not in self._copying and key not in self._exclusive:
                await self._refresh(key, target)

    # --- what is due -------------------------------------------------------------------------

    def _note(self, key: AgentKey) -> None:
        """Let the next sweep check an agent, unless no copy can be due for it."""
        has_copies = self._fleet.directory.has_copies(key)
        self._has_copies = self._has_copies or has_copies
        if self._count or has_copies:
            self._changed[key] = None

    def _note_elapsed(self) -> None:
        """Recheck agents whose failed copy is due again, or whose copy may be lost."""
        now_s = self._fleet.clock.monotonic_s()
        for key in [key for key, until_s in self._rest_until_s.items() if until_s <= now_s]:
            del self._rest_until_s[key]
            self._note(key)
        while self._copied:
            (key, node), (_, until_s) = next(iter(self._copied.items()))
            if until_s > now_s:
                break
            del self._copied[key, node]
            self._note(key)

    async def _note_nodes(self) -> None:
        """Recheck the agents of nodes that joined, left, or take agents again."""
        if not (self._count or self._has_copies):
            return
        states = {m.name: self._node_state(m) for m in self._fleet.membership.members}
        if states == self._node_states:
            return
        before, self._node_states = self._node_states, states
        for key in self._unmet:
            self._note(key)
        self._unmet.clear()
        for name, state in states.items():
            if before.get(name) != state:
                for key in self._fleet.directory.keys_at(name):
                    self._note(key)
                await asyncio.sleep(0)  # a node may hold thousands

    def _node_state(self, member: Member) -> object:
        view = member.view
        if view is None:
            return None
        takes = view.state, view.reuse, view.degraded is None, view.fingerprint
        return self._fleet.is_alive(member.name), takes

    async def _all_due(
        self,
    ) -> tuple[list[tuple[AgentKey, NodeName]], list[tuple[AgentKey, Holding]]]:
        """Return the copies to make, and those to renew; agents without any are not kept."""
        due, stale = list[tuple[AgentKey, NodeName]](), list[tuple[AgentKey, Holding]]()
        takes = {view.name for view in self._fleet.ready()}
        for number, key in enumerate(list(islice(self._changed, REPLICAS_CHECKED_MAX))):
            if len(due) >= REPLICAS_WAITING_MAX or len(stale) >= REPLICAS_WAITING_MAX:
                break  # the next sweep looks at the others
            if number % REPLICAS_CHECKED_PER_STEP == REPLICAS_CHECKED_PER_STEP - 1:
                await asyncio.sleep(0)
            self._changed.pop(key, None)
            targets, copies = self._find_due_copies(key, takes)
            due += ((key, target) for target in targets)
            stale += ((key, copy) for copy in copies)
            if targets or copies or key in self._exclusive:
                self._changed[key] = None  # until nothing is due
        return due, stale

    def _find_due_copies(
        self, key: AgentKey, takes: AbstractSet[NodeName]
    ) -> tuple[list[NodeName], list[Holding]]:
        """Return the nodes that are to get a copy of an agent, and its copies to renew."""
        owner = self._fleet.directory.owner(key)
        if owner is None or not self._is_ready(owner):
            return [], []
        is_resting = key in self._rest_until_s or key in self._exclusive
        targets = [] if is_resting else list(self._due(key, owner, takes))
        return targets, self._outdated_copies(key, owner)

    def _is_ready(self, owner: Holding) -> bool:
        """Return whether the owner's disk has anything to copy."""
        view = owner.view
        if view is None or owner.state is not OwnerState.OWNED or not view.durable:
            return False
        return self._fleet.is_alive(owner.node) and view.tokens > 0

    def _due(
        self, key: AgentKey, owner: Holding, takes: AbstractSet[NodeName]
    ) -> Iterator[NodeName]:
        """Yield the nodes that are to get a copy: those of kept replicas, then the cheapest."""
        holdings = self._fleet.directory.unerased_holdings(key)
        copies = [h for h in holdings if h.state is OwnerState.REPLICA and h.node in takes]
        pinned = [h for h in copies if h.view is not None and h.view.kept]
        yield from (h.node for h in pinned if not h.is_current(owner))
        served_nodes = {h.node for h in copies if h.is_current(owner) or h in pinned}
        missing_count = self._count - len(served_nodes)
        if missing_count > 0:
            copied = {node for node in takes if self._was_copied(key, node, owner)}
            targets = [route.target for route in routes(snapshots.of_agent(self._fleet, key))]
            if len(targets) < self._count:
                self._unmet[key] = None
            yield from islice(
                (node for node in targets if node not in served_nodes | copied), missing_count
            )

    def _was_copied(self, key: AgentKey, node: NodeName, owner: Holding) -> bool:
        turn, _ = self._copied.get((key, node), (None, 0.0))
        return owner.view is not None and turn == _turn_of(owner.view) and owner.view.tail != ""

    def _outdated_copies(self, key: AgentKey, owner: Holding) -> list[Holding]:
        """Return the copies that still contain what their owner has forgotten."""
        assert owner.view is not None, "its node lists it"
        forgotten = applied_forgets(owner.view)
        if not forgotten:
            return []
        return [
            holding
            for holding in self._fleet.directory.unerased_holdings(key)
            if holding.state is OwnerState.REPLICA and self._fleet.is_alive(holding.node)
            if holding.view is None or forgotten - applied_forgets(holding.view)
        ]

    async def _forget_in_copy(self, key: AgentKey, copy: Holding) -> None:
        """Renew a copy that is needed; drop one that is not, or that cannot be renewed."""
        is_wanted = self._count > 0 or (copy.view is not None and copy.view.kept)
        if is_wanted and self._moves.is_idle and key not in self._rest_until_s:
            await self._refresh(key, copy.node)
            if key not in self._rest_until_s:
                return
        await best_effort_call(self._fleet.link(copy.node), DropReplica(*key))
        member = self._fleet.membership.find(copy.node)
        if member is not None:
            await self._fleet.membership.heartbeat(member)

    # --- copying -----------------------------------------------------------------------------

    async def _refresh(self, key: AgentKey, target: NodeName) -> None:
        owner = self._fleet.directory.owner(key)
        task = self._start(key, target, kept=None, background=True)
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if error is not None:
            alias, why = self._fleet.alias(key), getattr(error, "code", type(error).__name__)
            _LOG.info("agent %s has no new copy on %s: %s", alias, target, why)
            self._rest_until_s[key] = self._fleet.clock.monotonic_s() + REPLICA_RETRY_S
        elif owner is not None and owner.view is not None:
            until_s = self._fleet.clock.monotonic_s() + EVICTED_REPLICA_RETRY_S
            self._copied[key, target] = _turn_of(owner.view), until_s
            self._copied.move_to_end((key, target))

    def _start(
        self, key: AgentKey, target: NodeName, *, kept: bool | None, background: bool = False
    ) -> asyncio.Task[CopyReceipt]:
        if key in self._copying or key in self._exclusive:
            message = f"agent {key[1]} is being copied or erased; try again when that is done"
            raise ConflictError(message, code="copy_in_progress")
        task = asyncio.create_task(self._copy(key, target, kept=kept, background=background))
        self._copying[key] = task
        task.add_done_callback(lambda ended: self._note_end(key, ended))
        return task

    def _note_end(self, key: AgentKey, task: asyncio.Task[CopyReceipt]) -> None:
        self._copying.pop(key, None)
        failed = task.cancelled() or task.exception() is not None
        self._telemetry.note_copy(
            "replica", 0 if failed else task.result().bytes_sent, ok=not failed
        )

    async def _copy(
        self, key: AgentKey, target: NodeName, *, kept: bool | None, background: bool
    ) -> CopyReceipt:
        fleet, source = self._fleet, self._fleet.require_owner(key).node
        keeps = self._is_kept(key, target) if kept is None else kept
        receipt = await copy_agent(
            fleet,
            key,
            target,
            lambda name, raw: KeepReplica(name, raw, source, keeps),
            background=background,
        )
        member = fleet.membership.find(target)
        if member is not None:
            await fleet.membership.heartbeat(member)  # so that the next sweep sees the copy
        return receipt

    def _is_kept(self, key: AgentKey, target: NodeName) -> bool:
        holdings = self._fleet.directory.holdings(key)
        return any(h.node == target and h.view is not None and h.view.kept for h in holdings)


def _turn_of(view: AgentView) -> object:
    """Return a value that identifies an agent's last turn and settings."""
    return view.tail, settings_fingerprint(view)
