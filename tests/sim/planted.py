"""Faults planted into the real code to see whether the simulation finds them.

Each stands for one rule that the product keeps; nothing in the product knows of them.
"""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from fabric.record.layout import EMPTY_LAYOUT
from fabric.record.manifest import OwnerState
from node.agents.outgoing import OutgoingMove
from node.engine.memory_budget import Reservation
from node.migration.incoming_cleanup import IncomingCleanup
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.tombstones import TombstoneStore
from node.tiers import disk_budget, eviction
from node.tiers.agent_records import AgentRecords
from node.tiers.flusher import Flusher
from node.tiers.record_writer import RecordWriter
from node.turn import prefix
from node.turn.claim import Claims
from node.turn.prefix import Prefixes
from node.turn.saver import Saver
from node.turn.turn import Turn
from router.fleet.directory import Directory
from router.fleet.membership import Membership
from router.moves.migration import Migration
from router.moves.recovery import Recovery
from router.placement import placement
from router.turns.open_turn import OpenTurn
from tests.sim.planted_device import DEVICE_PLANTS
from tests.sim.planted_directives import DIRECTIVE_PLANTS
from tests.sim.planted_edits import EDIT_PLANTS
from tests.sim.planted_lending import LENDING_PLANTS
from tests.sim.planted_restarts import RESTART_PLANTS
from tests.sim.replaced import replaced


def source_serves_after_the_seal():
    """Sealed agents accept turns, and a turn that runs at the seal continues."""

    async def own(self, agent, asked, erased_epoch):
        record = agent.manifest
        if record.state is OwnerState.SEALED:
            agent.manifest = replace(record, state=OwnerState.OWNED)

    return replaced(Claims, "_check_ownership", own)


def target_commits_without_the_tail():
    """The record that was copied first is committed, not the final one."""
    offer, commit = Migration._offer, Migration._commit

    async def offered(self):
        self.first = await offer(self)
        return self.first

    async def committed(self, final):
        return await commit(self, self.first)

    @contextmanager
    def both():
        with replaced(Migration, "_offer", offered), replaced(Migration, "_commit", committed):
            yield

    return both()


def copies_stay_pinned():
    """Blocks that a migration brought are never unpinned."""

    async def keep(self, name, kept):
        return None

    return replaced(IncomingCleanup, "release_pins", keep)


def late_copies_stay():
    """Blocks that arrive for an aborted move are kept."""

    async def keep(self, name, record):
        return None

    return replaced(IncomingCleanup, "abort_if_given_up", keep)


def owners_are_abandoned_early():
    """A node that is silent for half a second counts as lost."""
    health = Membership.health

    def impatient(self, name):
        member = self._members.get(name)
        if member and self._clock.monotonic_s() - member.heartbeat_s > 0.5:
            return type(health(self, name)).EXPIRED
        return health(self, name)

    return replaced(Membership, "health", impatient)


def a_takeover_keeps_the_epoch():
    """A takeover claims the agent at the epoch of the lost owner."""
    next_epoch = Directory.next_epoch
    return replaced(Directory, "next_epoch", lambda self, key: max(0, next_epoch(self, key) - 1))


def stale_owners_are_not_released():
    """Of two claims the lower one is not released."""

    async def skip(self, key):
        return None

    return replaced(Recovery, "_release_others", skip)


def owners_lose_their_agents_to_the_cheapest():
    """Placement ignores owners: every turn goes to the cheapest node."""
    return replaced(placement, "SERVING", ())


def lower_epoch_wins():
    """The directory chooses the lowest claim."""

    def owner(self, key):
        claims = [h for h in self.holdings(key) if h.state is not OwnerState.REPLICA]
        return min(claims, key=lambda holding: holding.epoch, default=None)

    return replaced(Directory, "owner", owner)


def replica_is_served_as_owner():
    """The directory treats any copy as the owner's, and nodes serve replicas."""

    def owner(self, key):
        return min(self.holdings(key), key=lambda h: (h.epoch, h.noted_s), default=None)

    async def own(self, agent, asked, erased_epoch):
        agent.manifest = replace(agent.manifest, state=OwnerState.OWNED, owner=self.health.name)

    @contextmanager
    def both():
        with replaced(Directory, "owner", owner), replaced(Claims, "_check_ownership", own):
            yield

    return both()


def reuse_more_than_is_common():
    """The common prefix of a prompt and the stored tokens is taken as longer than it is."""
    common = prefix.common_prefix

    def more(a, b):
        return min(common(a, b) + (16 if isinstance(a, list) else 0), len(a), len(b))

    plan = "fabric.turn.prompt_plan.common_prefix"

    @contextmanager
    def both():
        with mock.patch(plan, more), replaced(prefix, "common_prefix", more):
            yield

    return both()


def tenants_share_blocks():
    """Every tenant's blocks are named by the same key."""
    return replaced(AgentStore, "salt", lambda self, tenant: b"the same for all".ljust(32))


@contextmanager
def _all(*patches):
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


# --- durability --------------------------------------------------------------------------------


def a_restart_loses_everything():
    """A node that starts finds no record."""
    return replaced(ManifestStore, "load_all", lambda self: [])


def records_are_never_written():
    """A record counts as published, and is not written."""
    return replaced(ManifestStore, "publish", lambda *_: None)


def nothing_is_reused():
    """Every prompt is computed in full."""
    prepare = Prefixes.prepare

    async def prepared(self, agent, plan, answer):
        return await prepare(self, agent, replace(plan, kept_tokens=0), answer)

    return _all(
        replaced(Prefixes, "prepare", prepared),
        replaced(AgentStore, "shared_prefix", lambda self, tenant, ids: EMPTY_LAYOUT),
    )


def every_turn_claims_to_be_durable():
    """The last event reports a durable turn even after a failed write."""
    commit = Saver.commit

    async def committed(self, ended, shown, seal, note):
        await commit(self, ended, shown, seal, note)
        return True

    return replaced(Saver, "commit", committed)


def refused_writes_are_not_retried():
    """An agent that is in memory only stays there."""

    async def flush(self):
        return 0

    return replaced(Flusher, "flush", flush)


def steps_of_ownership_are_not_written():
    """Seals, releases and take-backs of idle agents are in memory only."""

    async def republish(self, agent, record):
        agent.manifest = record
        self.table.put(agent)

    return replaced(AgentRecords, "republish", republish)


def active_agents_are_evicted():
    """Agents that are sealed, offered or not saved are evicted like others."""

    def is_active(agent, offered):
        return agent.turn_lock.locked()

    return _all(
        replaced(eviction, "is_active", is_active), replaced(disk_budget, "is_active", is_active)
    )


def blocks_of_refused_saves_stay_pinned():
    """Blocks of a refused save are never unpinned."""
    return replaced(RecordWriter, "abandon", lambda self: self._let_go())


# --- erasure -----------------------------------------------------------------------------------


def tombstones_are_never_written():
    """An erasure is remembered in memory only."""
    return replaced(TombstoneStore, "_write", lambda self, item: self._unwritten.pop(item.agent))


def erasures_leave_the_blocks():
    """An erasure removes the record and leaves the blocks."""
    return replaced(BlockStore, "sweep", lambda self: None)


# --- ownership ---------------------------------------------------------------------------------


def the_router_fences_no_turn():
    """The router acknowledges turns of nodes that have lost the agent."""
    return replaced(OpenTurn, "_check_current", lambda self: None)


def nodes_fence_no_turn():
    """A released node acknowledges the turn that it is about to end."""
    fence = property(lambda self: 0, lambda self, value: None)
    return replaced(OutgoingMove, "fence", fence)


def released_owners_keep_serving():
    """A released node completes its running turn."""
    return _all(replaced(Turn, "cancel", lambda self: None), nodes_fence_no_turn())


def epochs_are_issued_twice():
    """The directory forgets the epochs that it, or the previous router, issued."""
    return _all(
        replaced(Directory, "issue", lambda self, key, epoch: None),
        replaced(Directory, "_fence_below", lambda self, key, epoch: None),
    )


def refused_records_are_not_put_back():
    """A record whose write failed after the rename stays, and counts as removed."""

    def put_back(self, name):
        self._doubtful.pop(name, None)
        return True

    return replaced(ManifestStore, "_put_back", put_back)


# --- memory ------------------------------------------------------------------------------------


def restores_wait_for_no_memory():
    """A turn is restored from disk before it is granted its memory."""
    prepare = Prefixes.prepare

    async def prepared(self, agent, plan, answer):
        made = await prepare(self, agent, plan, answer)
        if not made.is_stored:
            return made
        cache = await self.engine.between_steps(lambda: self.begin(made))
        return await self.restore(agent, made, cache, threading.Event())

    return replaced(Prefixes, "prepare", prepared)


def memory_is_granted_without_limit():
    """Every reservation is granted, even beyond the budget."""

    def grow(self, size_bytes, *, force=False):
        self.count(size_bytes)
        return True

    return replaced(Reservation, "grow", grow)


def prefetches_reserve_nothing():
    """A prefetch loads an agent even while running turns need the memory."""

    def claim(self, size_bytes):
        return True

    return replaced(Reservation, "claim", claim)


PLANTS = {
    "device": DEVICE_PLANTS,
    "directives": DIRECTIVE_PLANTS,
    "edits": EDIT_PLANTS,
    "restarts": RESTART_PLANTS,
    "lending": LENDING_PLANTS,
    "memory": (
        restores_wait_for_no_memory,
        memory_is_granted_without_limit,
        prefetches_reserve_nothing,
    ),
    "durability": (
        a_restart_loses_everything,
        records_are_never_written,
        nothing_is_reused,
        every_turn_claims_to_be_durable,
        refused_writes_are_not_retried,
        steps_of_ownership_are_not_written,
        active_agents_are_evicted,
        blocks_of_refused_saves_stay_pinned,
    ),
    "erasure": (
        tombstones_are_never_written,
        erasures_leave_the_blocks,
    ),
    "fence": (
        the_router_fences_no_turn,
        released_owners_keep_serving,
        epochs_are_issued_twice,
    ),
    "migration": (
        target_commits_without_the_tail,
        source_serves_after_the_seal,
        copies_stay_pinned,
        late_copies_stay,
        refused_records_are_not_put_back,
    ),
    "lease": (
        owners_are_abandoned_early,
        a_takeover_keeps_the_epoch,
        stale_owners_are_not_released,
    ),
    "placement": (owners_lose_their_agents_to_the_cheapest,),
    "directory": (lower_epoch_wins, replica_is_served_as_owner),
    "cache": (reuse_more_than_is_common, tenants_share_blocks),
}
