"""The judge of memory that came of others: of agents that are erased, or private since.

Every entry of a cache is known by the words that were read before it was computed, and by the
agents whose rows it came of, each with the number of its series. An agent begins a new series
whenever others must drop what they have of it.
"""

import contextlib
from collections import defaultdict
from unittest import mock

from node.store.manifest_store import ManifestStore
from node.tiers.derived_memory import DerivedMemory
from tests.sim.rows import ENTRY_BYTES, Rows

FULL_BLOCKS = ".full"


class Lineage:
    """Tracks which memory came from which agent in one run, and which must be gone."""

    def __init__(self, world):
        self._world = world
        self._series = defaultdict(int)  # by agent
        self._gone = {}  # (agent, series): since when no other agent may have its rows
        self._erased = set()  # those of them that were erased, and never come back
        self._borrowers = defaultdict(dict)  # by agent
        self._cuts_s = {}  # by agent: when its memory was last cut because it came of others
        self.judged_count = 0  # caches with rows of other agents
        self.dropped_count = 0  # receipts that count derived agents
        Rows.forget_all(self._origin)

    def _origin(self, owner):
        return owner, self._series[owner]

    @contextlib.contextmanager
    def taps(self):
        """Note whose memory is cut because it came of others."""
        drop, load = DerivedMemory._drop, ManifestStore._without_derived

        async def dropped(derived, agent):
            count = await drop(derived, agent)
            if count:
                self._note_cut(agent.key)
            return count

        def loaded(store, name, record):
            kept = load(store, name, record)
            if kept is not record:
                self._note_cut(record.key)
            return kept

        with (
            mock.patch.object(DerivedMemory, "_drop", dropped),
            mock.patch.object(ManifestStore, "_without_derived", loaded),
        ):
            yield

    def _note_cut(self, key):
        self._world.note(f"cut what {'/'.join(key)} has of others")
        self._cuts_s[key] = self._world.loop.now_s

    def was_cut(self, key, since_s=0.0):
        """Say whether an agent's memory was cut since then because it came of others."""
        return self._cuts_s.get(key, -1.0) >= since_s

    # --- what must go ------------------------------------------------------------------------

    def begin_series(self, key):
        """Note that an agent is about to begin a new series; return the one before."""
        before = self._series[key]
        self._series[key] += 1
        return before

    def revoke(self, key, before, *, is_erased=False):
        """Note the acknowledgement that no other agent has rows of an agent's series up to one."""
        for series in range(before + 1):
            self._gone.setdefault((key, series), self._world.loop.now_s)
            if is_erased:
                self._erased.add((key, series))

    def allow(self, key):
        """Note that others may borrow of an agent again, also what it computed before."""
        for name in [each for each in self._gone.keys() - self._erased if each[0] == key]:
            del self._gone[name]

    def new_borrowers(self, key):
        """List the agents that have begun with rows of an agent since this was last asked."""
        return list(self._borrowers.pop(key, ()))

    # --- what is there -----------------------------------------------------------------------

    def settle(self, cache, exact, node):
        """Note what a cache came of whose tokens behind `exact` may be others', and judge it."""
        seen = frozenset()
        for entry in _entries(cache, 0)[:exact]:
            if any(agent != cache.owner for agent, _ in Rows.origins.get(entry, ())):
                Rows.origins[entry] = frozenset()  # two agents' text alone makes it
        for entry in _entries(cache, exact):
            if entry not in Rows.settled:
                Rows.settled.add(entry)
                if cache.owner in Rows.known.get(entry, ())[2:]:
                    Rows.origins[entry] = Rows.origins.get(entry, frozenset()) | seen
            seen |= Rows.origins.get(entry, frozenset())
        cache.came_of = seen
        for agent, _ in sorted(seen):
            if cache.owner not in {None, agent}:
                self._borrowers[agent][cache.owner] = None
        problem = self._problem(cache.owner, seen, node)
        if problem:
            self._world.fail(f"{node}: {cache.owner} answers by {problem}")

    def check_memory(self, where, key, cache, exact):
        """Judge memory when all is quiet."""
        seen = frozenset().union(*(Rows.origins.get(entry, ()) for entry in _entries(cache, exact)))
        problem = self._problem(key, seen, None)
        if problem:
            self._world.fail(f"{where}: it has {problem}")

    def _problem(self, key, seen, node):
        """Say what memory came of that it must not; nothing of what its node may not know yet."""
        watch, world = self._world.watch, self._world
        self.judged_count += any(agent != key for agent, _ in seen)
        for origin in sorted(seen & self._gone.keys()):
            agent, series = origin
            gone_s = self._gone[origin]
            if agent == key:
                continue
            if node is None or (watch.was_well_since(node, gone_s) and not world.network.is_bad):
                return f"rows of {agent}, series {series}, which was gone at {gone_s:.1f} s"
        return None

    def check_words(self, name, marker):
        """Judge that no disk and no cache has a row that was computed with an erased word."""
        tainted = {entry for entry, words in Rows.words.items() if marker in words}
        if not tainted:
            return
        for host in self._world.nodes.values():
            for file, raw in host.platter.files.items():
                if FULL_BLOCKS in file and not tainted.isdisjoint(_rows_in(raw)):
                    self._world.fail(f"{name}: erased, and {host.name} has memory of it in {file}")
                    return
            for agent in host.node.table:
                cache = agent.cache
                if cache is not None and not tainted.isdisjoint(_entries(cache, 0)):
                    self._world.fail(f"{name}: erased, and {host.name} has it hot as {agent.key}")
                    return

    def derived(self):
        """List by node the agents whose stored memory came of others, with how much it is."""
        found = {}
        for host in self._world.nodes.values():
            agents = host.node.table if host.node is not None else ()
            found[host.name] = {
                each.key: (each.manifest.tokens_count - each.exact_tokens, each.saved)
                for each in agents
                if each.saved is not None and each.saved.edited is not None and not each.is_busy
            }
        return found

    def check_receipt(self, key, before, receipt):
        """Judge the counts of agents and tokens in a node's receipt of dropped memory.

        `before` has the derived memory of idle agents before the erasure.
        """
        agents, tokens = receipt.derived_agents, receipt.derived_tokens
        self.dropped_count += agents > 0
        if bool(agents) != bool(tokens):
            self._world.fail(f"{receipt.node}: {tokens} tokens of {agents} agents were dropped")
        host = self._world.nodes[receipt.node]
        if host.node is None or host.platter.has_failed or host.platter.has_been_full:
            return
        dropped = []
        for name, (count, saved) in before[receipt.node].items():
            agent = host.node.table.get(name)
            is_cut = agent is not None and name != key and agent.saved is not None
            is_cut = is_cut and agent.saved.edited is None
            is_cut = is_cut and agent.saved.text == saved.text[: len(agent.saved.text)]
            lent = any(each.agent == host.node.erased.digest(*key) for each in _lenders(saved))
            if is_cut and lent and count:
                dropped.append(count)
        if len(dropped) > agents or sum(dropped) > tokens:
            self._world.fail(
                f"{receipt.node} counts {tokens} tokens of {agents} agents, and dropped {dropped}"
            )


def _lenders(record):
    return record.edited.known_lenders if record.edited is not None else ()


def _entries(cache, start):
    held = cache.held[start * ENTRY_BYTES :].tobytes()
    return [held[at : at + ENTRY_BYTES] for at in range(0, len(held), ENTRY_BYTES)]


def _rows_in(raw):
    """List what a block's file has in place of rows, and whatever follows them."""
    first = 8 + int.from_bytes(raw[:8], "little")
    return [bytes(raw[at : at + ENTRY_BYTES]) for at in range(first, len(raw), ENTRY_BYTES)]
