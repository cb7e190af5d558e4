"""Faults put into the real code while a test looks whether the simulation finds them.

Each stands for one rule that the product keeps; nothing in the product knows of them.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from fabric.manifest import OwnerState
from node import claim, migration_target, prefix
from node.agent_store import AgentStore
from router.directory import Directory
from router.membership import Membership
from router.migration import Migration
from router.recovery import Recovery


@contextmanager
def _patched(owner, name, value):
    with mock.patch.object(owner, name, value):
        yield


def source_serves_after_the_seal():
    """Whoever asks gets the agent, sealed or not, and whoever still runs at the seal runs on."""

    async def own(node, agent, asked):
        record = agent.manifest
        if record.state is OwnerState.SEALED:
            agent.manifest = replace(record, state=OwnerState.OWNED)

    return _patched(claim, "_own", own)


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
        with _patched(Migration, "_offer", offered), _patched(Migration, "_commit", committed):
            yield

    return both()


def copies_stay_pinned():
    """What a migration brought is never let go of."""

    async def keep(node, migration, kept):
        return None

    return _patched(migration_target, "let_go", keep)


def owners_are_given_up_early():
    """A node that is silent for half a second is taken for lost."""
    health = Membership.health

    def impatient(self, name):
        member = self._members.get(name)
        if member and self._clock.monotonic_s() - member.beat_s > 0.5:
            return type(health(self, name)).EXPIRED
        return health(self, name)

    return _patched(Membership, "health", impatient)


def a_takeover_keeps_the_epoch():
    """Who takes an agent over claims it no higher than who lost it."""
    next_epoch = Directory.next_epoch
    return _patched(Directory, "next_epoch", lambda self, key: max(0, next_epoch(self, key) - 1))


def stale_owners_are_not_released():
    """Of two claims the lower one stays."""

    async def leave(self, key):
        return None

    return _patched(Recovery, "_release_others", leave)


def lower_epoch_wins():
    """The directory believes the lowest claim."""

    def owner(self, key):
        claims = [h for h in self.holdings(key) if h.state is not OwnerState.REPLICA]
        return min(claims, key=lambda holding: holding.epoch, default=None)

    return _patched(Directory, "owner", owner)


def replica_is_served_as_owner():
    """The directory takes any copy for the owner's, and nodes serve what they have."""

    def owner(self, key):
        return min(self.holdings(key), key=lambda h: (h.epoch, h.noted_s), default=None)

    async def own(node, agent, asked):
        agent.manifest = replace(agent.manifest, state=OwnerState.OWNED, owner=node.name)

    @contextmanager
    def both():
        with _patched(Directory, "owner", owner), _patched(claim, "_own", own):
            yield

    return both()


def reuse_more_than_is_common():
    """A prompt is taken to begin like the stored tokens for longer than it does."""
    common = prefix.common_prefix_items

    def more(a, b):
        return min(common(a, b) + 16, len(a), len(b))

    plan = "node.prompt_plan.common_prefix_items"

    @contextmanager
    def both():
        with mock.patch(plan, more), _patched(prefix, "common_prefix_items", more):
            yield

    return both()


def tenants_share_blocks():
    """Every tenant's blocks are named by the same key."""
    return _patched(AgentStore, "salt", lambda self, tenant: b"the same for all".ljust(32))


PLANTS = {
    "migration": (
        target_commits_without_the_tail,
        source_serves_after_the_seal,
        copies_stay_pinned,
    ),
    "lease": (
        owners_are_given_up_early,
        a_takeover_keeps_the_epoch,
        stale_owners_are_not_released,
    ),
    "directory": (lower_epoch_wins, replica_is_served_as_owner),
    "cache": (reuse_more_than_is_common, tenants_share_blocks),
}
