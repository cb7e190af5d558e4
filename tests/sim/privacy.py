"""Judge of private caches: no other agent may reuse rows that only a private agent has."""

import contextlib
from unittest import mock

from fabric.record.layout import exact_beginning
from fabric.record.manifest import OwnerState
from node.turn.prefix import Prefixes
from tests.sim.rows import ENTRY_BYTES, Rows


class Privacy:
    """Checks of every cache that is restored for a turn."""

    def __init__(self, world, verbs):
        self._world = world
        self._verbs = verbs
        self._lenders = {}  # by agent: what may be lent to its turn, and private agents
        self.judged_count = 0

    @contextlib.contextmanager
    def taps(self):
        """Record the possible lenders of each turn, and check the cache it gets."""
        prepare, restore = Prefixes.prepare, Prefixes.restore

        def prepared(prefixes, agent, plan, request):
            self._lenders[agent.key] = self._list_lenders(prefixes, agent)
            return prepare(prefixes, agent, plan, request)

        async def restored(prefixes, agent, made, cache, cancel):
            self._add_leased(prefixes, agent, made.plan.ids)
            made = await restore(prefixes, agent, made, cache, cancel)
            self._check(agent, cache, made.plan.ids)
            return made

        with (
            mock.patch.object(Prefixes, "prepare", prepared),
            mock.patch.object(Prefixes, "restore", restored),
        ):
            yield

    def _list_lenders(self, prefixes, agent):
        """Return the tokens that may be lent, the private agents, and the leased blocks."""
        lent, private = [], set()
        for other in prefixes.table:
            if other.key[0] != agent.key[0] or other.saved is None:
                continue
            is_owned = other.manifest.state is OwnerState.OWNED
            if other is agent or not other.manifest.is_private:
                lent += [list(other.saved.token_ids), list(exact_beginning(other.saved).tokens)]
            if other is not agent and is_owned and self._verbs.is_private(other.key):
                private.add(other.key)
        for move in prefixes.moves:
            is_other = move.key is not None and move.key != agent.key
            if is_other and self._verbs.is_private(move.key):
                private.add(move.key)
        return lent, private, prefixes.leases.refs

    def _add_leased(self, prefixes, agent, ids):
        """Count blocks leased from other nodes as lent: leases exclude private memory."""
        lent, _, leased = self._lenders.setdefault(agent.key, ([], set(), frozenset()))
        end = 0
        for block in prefixes.store.shared_prefix(agent.key[0], ids).blocks:
            if block not in leased | prefixes.leases.refs:
                break
            end += block.tokens_count
        lent.append(list(ids[:end]))

    def _check(self, agent, cache, ids):
        lent, private, _ = self._lenders.pop(agent.key, ((), (), ()))
        if not private:
            return
        held = cache.held.tobytes()
        for at in range(cache.tokens_count):
            row = Rows.known.get(held[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES])
            if row is None or row[1] != at or agent.key in row[2:]:
                return  # this row and all later ones were moved, or are its own
            self.judged_count += 1
            if {*row[2:]} <= private and not any(each[: at + 1] == ids[: at + 1] for each in lent):
                self._world.fail(
                    f"{agent.key} begins with {at + 1} tokens that only the private {row[2:]} has"
                )
                return
