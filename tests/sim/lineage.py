"""Judge of derived caches: none may hold rows of agents that were erased or made private since.

The judge knows of every cache entry which words were read before it was computed, and from which
agents' rows it derives, each with the number of its series. An agent begins a new series whenever
other agents must drop the rows that they borrowed.
"""

import contextlib
from collections import defaultdict
from unittest import mock

from fabric.record.manifest import OwnerState
from node.migration import copy_targets, hibernation_import
from node.store.manifest_store import ManifestStore
from node.tiers.derived_memory import DerivedMemory
from tests.sim import oracle
from tests.sim.rows import ENTRY_BYTES, STATE_BYTES, Rows
from tests.sim.window import WINDOW_ENTRY_BYTES, window_entry

WINDOW_ROWS_MIN = 3  # per file: so many entries of four bytes do not match by chance


class Lineage:
    """The agents from which each memory of one run derives, and those revoked."""

    def __init__(self, world):
        self._world = world
        self._series = defaultdict(int)  # by agent
        self._revoked = {}  # (agent, series): since when no other agent may have its rows
        self._erased = set()  # revoked series of erased agents, which never come back
        self._borrowers = defaultdict(dict)  # by agent
        self._cuts_s = {}  # by agent: when derived rows were last cut from its memory
        self._sources = defaultdict(set)  # by agent: the agents that it is a copy of
        self._forgotten = {}  # by marker: the talk whose agent forgot it, and since when
        self.begun_count = 0  # new series and directives: each may cut derived memory
        self.judged_count = 0  # caches with rows of other agents
        self.dropped_count = 0  # receipts that count derived agents
        Rows.forget_all(self._origin)

    def _origin(self, owner):
        return owner, self._series[owner]

    @contextlib.contextmanager
    def taps(self):
        """Record cuts of derived memory, and copies of agents."""
        drop, load = DerivedMemory._drop, ManifestStore._without_derived

        async def dropped(derived, agent):
            self._note_cut(agent.key)
            try:
                return await drop(derived, agent)
            finally:  # it waited for the agent's turn, which may be acknowledged by now
                self._note_cut(agent.key)

        def loaded(store, name, record):
            kept = load(store, name, record)
            if kept is not record:
                self._note_cut(record.key)
            return kept

        with (
            mock.patch.object(DerivedMemory, "_drop", dropped),
            mock.patch.object(ManifestStore, "_without_derived", loaded),
            mock.patch.object(
                copy_targets, "with_new_owner", self._recording(copy_targets.with_new_owner)
            ),
            mock.patch.object(
                hibernation_import,
                "with_new_owner",
                self._recording(hibernation_import.with_new_owner),
            ),
        ):
            yield

    def _recording(self, with_new_owner):
        """Wrap the function that gives a record a new owner: record whose rows the copy has."""

        def owned(record, key, *place):
            if key != record.key:
                self._note_copied(record)
                self._sources[key] |= {record.key} | self._sources[record.key]
                if self.was_cut(record.key):  # the copy lacks what its source had lost
                    self._cuts_s[key] = self._world.loop.now_s
            return with_new_owner(record, key, *place)

        return owned

    def _note_copied(self, record):
        """Record that a copy has a record's exact rows, which outlive their agent."""
        exact = record.edited.exact_tokens if record.edited is not None else record.tokens_count
        for entry in oracle.entries_of(record.token_ids[:exact], self._world.kind):
            if Rows.origins.get(entry):
                Rows.origins[entry] = frozenset()

    def _note_cut(self, key):
        self._world.note(f"cut derived memory of {'/'.join(key)}")
        self._cuts_s[key] = self._world.loop.now_s

    def was_cut(self, key, since_s=0.0):
        """Return whether derived rows of an agent's memory were cut since then."""
        return self._cuts_s.get(key, -1.0) >= since_s

    # --- revocations -------------------------------------------------------------------------

    def begin_series(self, key):
        """Begin a new series of an agent; return the one before."""
        before = self._series[key]
        self._series[key] += 1
        self.begun_count += 1
        return before

    def revoke(self, key, before, *, is_erased=False):
        """Record an acknowledgement: no other agent has rows of the series up to `before`."""
        for series in range(before + 1):
            self._revoked.setdefault((key, series), self._world.loop.now_s)
            if is_erased:
                self._erased.add((key, series))

    def forget_word(self, talk, marker):
        """Record an acknowledgement: no other agent has rows computed with a word."""
        self._forgotten[marker] = talk, self._world.loop.now_s

    def remember_words(self, talk):
        """Record that an agent may read and lend words that it forgot."""
        self._forgotten = {
            marker: each for marker, each in self._forgotten.items() if each[0] is not talk
        }

    def allow(self, key):
        """Record that others may borrow from an agent again, earlier rows included."""
        for name in [each for each in self._revoked.keys() - self._erased if each[0] == key]:
            del self._revoked[name]

    def new_borrowers(self, key):
        """List the agents that have begun with rows of an agent since the last call."""
        return list(self._borrowers.pop(key, ()))

    # --- checks of caches -------------------------------------------------------------------

    def settle(self, cache, exact, node):
        """Record and check the origins of a cache, whose rows after `exact` may be borrowed."""
        seen = frozenset()
        for entry in _entries(cache, 0)[:exact]:
            if any(agent != cache.owner for agent, _ in Rows.origins.get(entry, ())):
                Rows.origins[entry] = frozenset()  # computed from text that two agents share
        for place, entry in enumerate(_entries(cache, exact), exact):
            if entry not in Rows.settled:
                Rows.settled.add(entry)
                is_shared = Rows.origins.get(entry) == frozenset()  # several agents computed it
                _, computed_at, *owners = Rows.known.get(entry, (None, None))
                was_moved = computed_at != place  # so it was computed after other rows
                if cache.owner in owners and not (is_shared or was_moved):
                    Rows.origins[entry] = Rows.origins.get(entry, frozenset()) | seen
            seen |= Rows.origins.get(entry, frozenset())
        cache.borrowed_origins = seen
        for agent, _ in sorted(seen):
            if cache.owner not in {None, agent}:
                self._borrowers[agent][cache.owner] = None
        problem = self._problem(cache.owner, seen, node) or self._word(cache, exact, node)
        if problem:
            self._world.fail(f"{node}: {cache.owner} answers from {problem}")

    def check_memory(self, where, key, cache, exact):
        """Check memory in the quiet state."""
        seen = frozenset().union(*(Rows.origins.get(entry, ()) for entry in _entries(cache, exact)))
        problem = self._problem(key, seen, None) or self._word(cache, exact, None)
        if problem:
            self._world.fail(f"{where}: it has {problem}")

    def _problem(self, key, seen, node):
        """Describe a revoked origin of memory; None if its node need not know of any."""
        self.judged_count += any(agent != key for agent, _ in seen)
        for origin in sorted(seen & self._revoked.keys()):
            agent, series = origin
            revoked_s = self._revoked[origin]
            is_copy = agent in self._sources.get(key, ()) and origin not in self._erased
            if agent == key or is_copy:  # a private agent's file is its owner's
                continue
            if self._must_have_it(node, revoked_s):
                return f"rows of {agent}, series {series}, revoked at {revoked_s:.1f} s"
        return None

    def _word(self, cache, exact, node):
        """Describe a row computed with a word that its agent forgot; None where there is none."""
        for entry in _entries(cache, exact) if self._forgotten else ():
            for marker in sorted(Rows.words.get(entry, frozenset()) & self._forgotten.keys()):
                talk, forgotten_s = self._forgotten[marker]
                is_other = cache.owner not in {None, talk.key} and not talk.is_copied
                if is_other and self._must_have_it(node, forgotten_s) and self._has_forgotten(talk):
                    return f"rows computed with {marker}, forgotten at {forgotten_s:.1f} s"
        return None

    def _has_forgotten(self, talk):
        """Return whether an agent's forgotten message is forgotten still."""
        judge = self._world.directing.judge
        return talk.acked is None or not judge.is_lost(talk, talk.acked.node)

    def _must_have_it(self, node, since_s):
        """Return whether a node must have changes acknowledged then; at the end all must."""
        watch, network = self._world.watch, self._world.network
        return node is None or (watch.was_well_since(node, since_s) and not network.is_bad)

    def check_words(self, name, marker):
        """Check that no disk and no cache has a row computed with an erased word."""
        tainted = {entry for entry, words in Rows.words.items() if marker in words}
        if not tainted:
            return
        windows = {window_entry(entry) for entry in tainted}
        for host in self._world.nodes.values():
            for file, raw in host.drive.files.items():
                if _has_any(file, raw, tainted, windows):
                    self._world.fail(f"{name}: erased, but {host.name} has memory of it in {file}")
                    return
            for agent in host.node.resources.table:
                cache = agent.cache
                if cache is not None and not tainted.isdisjoint(_entries(cache, 0)):
                    self._world.fail(f"{name}: erased, but {host.name} has it hot as {agent.key}")
                    return

    def derived(self):
        """Return by node the idle agents with derived memory on disk, and its size."""
        found = {}
        for host in self._world.nodes.values():
            agents = host.node.resources.table if host.node is not None else ()
            found[host.name] = {
                each.key: (each.manifest.tokens_count - each.exact_tokens, each.saved)
                for each in agents
                if each.saved is not None and each.saved.edited is not None and not each.is_busy
            }
        return found

    def check_receipt(self, key, before, receipt):
        """Check the counts of agents and tokens in a node's receipt of dropped memory.

        `before` has the derived memory of idle agents before the erasure.
        """
        agents, tokens = receipt.derived_agents, receipt.derived_tokens
        self.dropped_count += agents > 0
        if bool(agents) != bool(tokens):
            self._world.fail(f"{receipt.node}: {tokens} tokens of {agents} agents were dropped")
        host = self._world.nodes[receipt.node]
        if host.node is None or host.drive.has_failed or host.drive.has_been_full:
            return
        dropped = []
        for name, (count, saved) in before[receipt.node].items():
            agent = host.node.resources.table.get(name)
            is_cut = agent is not None and name != key and agent.saved is not None
            # A replica may be a new copy of what its owner has cut.
            is_cut = is_cut and agent.manifest.state is not OwnerState.REPLICA
            is_cut = is_cut and agent.saved.edited is None
            is_cut = is_cut and agent.saved.text == saved.text[: len(agent.saved.text)]
            lent = any(
                each.agent == host.node.resources.erased.digest(*key) for each in _lenders(saved)
            )
            if is_cut and lent and count:
                dropped.append(count)
        if len(dropped) > agents or sum(dropped) > tokens:
            self._world.fail(
                f"{receipt.node} counts {tokens} tokens of {agents} agents, but dropped {dropped}"
            )


def _lenders(record):
    return record.edited.known_lenders if record.edited is not None else ()


def _entries(cache, start):
    held = cache.held[start * ENTRY_BYTES :].tobytes()
    return [held[at : at + ENTRY_BYTES] for at in range(0, len(held), ENTRY_BYTES)]


def _has_any(file, raw, tainted, windows):
    """Return whether a block file, perhaps quarantined, has some of these entries."""
    if ".window" in file:
        matches = sum(row in windows for row in _rows_in(raw, WINDOW_ENTRY_BYTES))
        return matches >= WINDOW_ROWS_MIN
    size_bytes = STATE_BYTES if ".state" in file else ENTRY_BYTES
    is_block = any(kind in file for kind in (".full", ".state"))
    return is_block and not tainted.isdisjoint(_rows_in(raw, size_bytes))


def _rows_in(raw, size_bytes):
    """Split the bytes after the header of a block file into rows."""
    first = 8 + int.from_bytes(raw[:8], "little")
    return [bytes(raw[at : at + size_bytes]) for at in range(first, len(raw), size_bytes)]
