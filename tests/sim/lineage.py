"""Judge of derived caches: none may hold rows of agents that were erased or made private since.

Every entry of a cache is known by the words that were read before it was computed, and by the
agents whose rows it came of, each with the number of its series. An agent begins a new series
whenever others must drop what they have of it.
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

WINDOW_ROWS_MIN = 3  # of a file: so many entries of four bytes are not alike by chance


class Lineage:
    """Tracks which memory came from which agent in one run, and which must be gone."""

    def __init__(self, world):
        self._world = world
        self._series = defaultdict(int)  # by agent
        self._gone = {}  # (agent, series): since when no other agent may have its rows
        self._erased = set()  # those of them that were erased, and never come back
        self._borrowers = defaultdict(dict)  # by agent
        self._cuts_s = {}  # by agent: when its memory was last cut because it came of others
        self._sources = defaultdict(set)  # by agent: those that it is a copy of
        self._forgotten = {}  # by marker: the talk whose agent forgot it, and since when
        self.begun_count = 0  # series, by what may take memory from others
        self.judged_count = 0  # caches with rows of other agents
        self.dropped_count = 0  # receipts that count derived agents
        Rows.forget_all(self._origin)

    def _origin(self, owner):
        return owner, self._series[owner]

    @contextlib.contextmanager
    def taps(self):
        """Note whose memory is cut because it came of others, and which agents are copied."""
        drop, load = DerivedMemory._drop, ManifestStore._without_derived

        async def dropped(derived, agent):
            self._note_cut(agent.key)
            try:
                return await drop(derived, agent)
            finally:  # it waited for the agent's turn, which may be acknowledged since
                self._note_cut(agent.key)

        def loaded(store, name, record):
            kept = load(store, name, record)
            if kept is not record:
                self._note_cut(record.key)
            return kept

        with (
            mock.patch.object(DerivedMemory, "_drop", dropped),
            mock.patch.object(ManifestStore, "_without_derived", loaded),
            mock.patch.object(copy_targets, "owned_anew", self._noted(copy_targets.owned_anew)),
            mock.patch.object(
                hibernation_import, "owned_anew", self._noted(hibernation_import.owned_anew)
            ),
        ):
            yield

    def _noted(self, own_anew):
        """Wrap the step that makes another agent of a record: note whose rows it has by then."""

        def owned(record, key, *place):
            if key != record.key:
                self._note_copied(record)
                self._sources[key] |= {record.key} | self._sources[record.key]
                if self.was_cut(record.key):  # the copy lacks what its source had lost
                    self._cuts_s[key] = self._world.loop.now_s
            return own_anew(record, key, *place)

        return owned

    def _note_copied(self, record):
        """Note that another agent has a record's exact rows: they outlive the first one."""
        exact = record.edited.exact_tokens if record.edited is not None else record.tokens_count
        for entry in oracle.entries_of(record.token_ids[:exact], self._world.kind):
            if Rows.origins.get(entry):
                Rows.origins[entry] = frozenset()

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
        self.begun_count += 1
        return before

    def revoke(self, key, before, *, is_erased=False):
        """Note the acknowledgement that no other agent has rows of an agent's series up to one."""
        for series in range(before + 1):
            self._gone.setdefault((key, series), self._world.loop.now_s)
            if is_erased:
                self._erased.add((key, series))

    def forget_word(self, talk, marker):
        """Note the acknowledgement that no other agent has rows computed with a word."""
        self._forgotten[marker] = talk, self._world.loop.now_s

    def remember_words(self, talk):
        """Note that an agent may read again, and lend, what it has forgotten."""
        self._forgotten = {
            marker: each for marker, each in self._forgotten.items() if each[0] is not talk
        }

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
        for place, entry in enumerate(_entries(cache, exact), exact):
            if entry not in Rows.settled:
                Rows.settled.add(entry)
                is_shared = Rows.origins.get(entry) == frozenset()  # others computed it alike
                _, computed_at, *owners = Rows.known.get(entry, (None, None))
                was_moved = computed_at != place  # so it was computed behind other rows
                if cache.owner in owners and not (is_shared or was_moved):
                    Rows.origins[entry] = Rows.origins.get(entry, frozenset()) | seen
            seen |= Rows.origins.get(entry, frozenset())
        cache.came_of = seen
        for agent, _ in sorted(seen):
            if cache.owner not in {None, agent}:
                self._borrowers[agent][cache.owner] = None
        problem = self._problem(cache.owner, seen, node) or self._word(cache, exact, node)
        if problem:
            self._world.fail(f"{node}: {cache.owner} answers by {problem}")

    def check_memory(self, where, key, cache, exact):
        """Judge memory when all is quiet."""
        seen = frozenset().union(*(Rows.origins.get(entry, ()) for entry in _entries(cache, exact)))
        problem = self._problem(key, seen, None) or self._word(cache, exact, None)
        if problem:
            self._world.fail(f"{where}: it has {problem}")

    def _problem(self, key, seen, node):
        """Say what memory came of that it must not; nothing of what its node may not know yet."""
        self.judged_count += any(agent != key for agent, _ in seen)
        for origin in sorted(seen & self._gone.keys()):
            agent, series = origin
            gone_s = self._gone[origin]
            is_copy = agent in self._sources.get(key, ()) and origin not in self._erased
            if agent == key or is_copy:  # the file of a private agent is its owner's
                continue
            if self._must_know(node, gone_s):
                return f"rows of {agent}, series {series}, which was gone at {gone_s:.1f} s"
        return None

    def _word(self, cache, exact, node):
        """Describe a row computed with a word that its agent forgot; None where there is none."""
        for entry in _entries(cache, exact) if self._forgotten else ():
            for marker in sorted(Rows.words.get(entry, frozenset()) & self._forgotten.keys()):
                talk, gone_s = self._forgotten[marker]
                is_other = cache.owner not in {None, talk.key} and not talk.is_copied
                if is_other and self._must_know(node, gone_s) and self._has_forgotten(talk):
                    return f"rows computed with {marker}, forgotten at {gone_s:.1f} s"
        return None

    def _has_forgotten(self, talk):
        """Return whether an agent's forgotten message has not come back."""
        judge = self._world.directing.judge
        return talk.acked is None or not judge.is_lost(talk, talk.acked.node)

    def _must_know(self, node, since_s):
        """Return whether a node must know what was acknowledged then; at the end all must."""
        watch, network = self._world.watch, self._world.network
        return node is None or (watch.was_well_since(node, since_s) and not network.is_bad)

    def check_words(self, name, marker):
        """Judge that no disk and no cache has a row that was computed with an erased word."""
        tainted = {entry for entry, words in Rows.words.items() if marker in words}
        if not tainted:
            return
        windows = {window_entry(entry) for entry in tainted}
        for host in self._world.nodes.values():
            for file, raw in host.drive.files.items():
                if _has_any(file, raw, tainted, windows):
                    self._world.fail(f"{name}: erased, and {host.name} has memory of it in {file}")
                    return
            for agent in host.node.resources.table:
                cache = agent.cache
                if cache is not None and not tainted.isdisjoint(_entries(cache, 0)):
                    self._world.fail(f"{name}: erased, and {host.name} has it hot as {agent.key}")
                    return

    def derived(self):
        """List by node the agents whose stored memory came of others, with how much it is."""
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
        """Judge the counts of agents and tokens in a node's receipt of dropped memory.

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
                f"{receipt.node} counts {tokens} tokens of {agents} agents, and dropped {dropped}"
            )


def _lenders(record):
    return record.edited.known_lenders if record.edited is not None else ()


def _entries(cache, start):
    held = cache.held[start * ENTRY_BYTES :].tobytes()
    return [held[at : at + ENTRY_BYTES] for at in range(0, len(held), ENTRY_BYTES)]


def _has_any(file, raw, tainted, windows):
    """Return whether a block's file, quarantined perhaps, has some of these entries."""
    if ".window" in file:
        few = sum(row in windows for row in _rows_in(raw, WINDOW_ENTRY_BYTES))
        return few >= WINDOW_ROWS_MIN
    size_bytes = STATE_BYTES if ".state" in file else ENTRY_BYTES
    is_block = any(kind in file for kind in (".full", ".state"))
    return is_block and not tainted.isdisjoint(_rows_in(raw, size_bytes))


def _rows_in(raw, size_bytes):
    """List what a block's file has in place of rows, and whatever follows them."""
    first = 8 + int.from_bytes(raw[:8], "little")
    return [bytes(raw[at : at + size_bytes]) for at in range(first, len(raw), size_bytes)]
