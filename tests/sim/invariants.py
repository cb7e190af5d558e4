"""Invariants after every step, and those of the quiet state at the end."""

from fabric.errors import CorruptDataError
from fabric.kvcache.block_chain import block_spans
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import tenant_salt
from fabric.record.layout import unedited_layout
from fabric.record.manifest import OwnerState
from fabric.record.provenance import TruncatedBy
from fabric.record.stored_part import restorable
from node.agents.outgoing import OutgoingState
from node.store.block_files import file_name
from node.tiers.restore import load_layout
from tests.sim import oracle
from tests.sim.clock import WALL_S
from tests.sim.edits import MOVABLE
from tests.sim.memory import Memory
from tests.sim.model import SimCache
from tests.sim.node_host import CLUSTER_KEY
from tests.support.incoming import pinned_blocks

LEFT_IN_PLACE = ("is stored but not indexed", "is no block")  # until a start that can remove it
ALL_BYTES = 1 << 40  # more than any simulated disk holds


class Invariants:
    """Checks of all nodes of one run."""

    def __init__(self, world):
        self._world = world
        self._seen = []
        self._memory = Memory(world)

    # --- after every step --------------------------------------------------------------------

    def check_step(self):
        """Check disks and memory, and owners if any node's table has changed."""
        seen = []
        for host in self._world.nodes.values():
            if host.node is not None:
                table = host.node.resources.table
                seen += (table, table.changes)
        if seen != self._seen:
            self._seen = seen
            nodes = [host.node for host in self._world.nodes.values() if host.node]
            self._check_owners(nodes)
            for node in nodes:
                self._memory.note_refused(node.resources.table)
        self._world.disk_judge.check_step()
        self._memory.check_step()

    def _check_owners(self, nodes):
        claims = {}
        for node in nodes:
            for agent in node.resources.table:
                record = agent.manifest
                if record.state is OwnerState.REPLICA or record.tenant.startswith("_"):
                    continue
                other = claims.setdefault((agent.key, record.epoch), node.name)
                if other != node.name:
                    self._world.fail(
                        f"{other} and {node.name} own {agent.key} at epoch {record.epoch}"
                    )

    # --- at the end --------------------------------------------------------------------------

    def check_quiet(self):
        """Check the quiet state before any client sends another turn."""
        for node in self._nodes:
            self._world.disk_judge.check_tables(node)
            unsaved = [agent.key for agent in node.resources.table if agent.is_unsaved]
            # If agents that may not be evicted fill the disk budget, others stay in memory.
            if unsaved and "budget" not in (node.health.degraded or ""):
                self._fail(f"{node.name}: {unsaved} are in memory only, and the disk is healthy")
            if node.health.problem is not None:
                self._fail(f"{node.name} no longer reuses any cache: {node.health.problem}")
            if any(node.moves.incoming.is_aborted(name) for name in pinned_blocks(node)):
                self._fail(f"{node.name} keeps blocks of aborted moves")
            for agent in node.resources.table:
                self._check_not_blocked(node, agent)
        for talk in self._world.clients.talks:
            self._world.reuse_judge.check_end(talk)

    def _check_not_blocked(self, node, agent):
        """Check that an agent does not refuse all turns, or keep them waiting for a move."""
        record, outgoing = agent.manifest, agent.outgoing
        is_erased = node.resources.erased.is_erased(agent.key, record.epoch)
        if record.epoch < outgoing.fence and not is_erased and not agent.is_unsaved:
            self._fail(f"{node.name}: {agent.key} is still claimed below its fence")
        if record.state is not OwnerState.SEALED and outgoing.state is OutgoingState.SEALED:
            self._fail(f"{node.name}: turns of {agent.key} wait, and no move is under way")

    def check_end(self):
        for check in (
            self._check_records,
            self._check_disks,
            self._check_erased,
            self._check_directory,
            self._check_leftovers,
        ):
            check()

    def _fail(self, text):
        self._world.fail(text)

    @property
    def _nodes(self):
        return [host.node for host in self._world.nodes.values()]

    def _check_records(self):
        """Check that records name their tenant's blocks, which hold what their tokens compute."""
        for node in self._nodes:
            for agent in node.resources.table:
                self._check_agent(node, agent)
            self._check_blocks(node)

    def _check_blocks(self, node):
        """Check that index and disk differ only by injected damage, and that a scrub finds it."""
        blocks, drive = node.resources.store.blocks, self._world.nodes[node.name].drive
        hurt = [name.removeprefix("blocks/").partition(".")[0] for name in drive.damaged]
        problems = [
            text for text in blocks.check_integrity() if not any(name in text for name in hurt)
        ]
        damaged = blocks.scrub(ALL_BYTES).damaged
        problems += [
            f"{ref.name} is damaged, and no fault did it"
            for ref in damaged
            if file_name(ref) not in drive.damaged
        ]
        problems += blocks.check_integrity()
        if drive.has_failed:
            # Files that could not be published or removed stay until the next start.
            problems = [text for text in problems if not text.endswith(LEFT_IN_PLACE)]
        if problems:
            self._fail(f"{node.name}: {problems[0]}")

    def _check_agent(self, node, agent):
        where, saved = f"{node.name}: {agent.key}", agent.saved
        is_edited = saved is not None and saved.edited is not None
        if agent.cache is not None:
            ids, exact = agent.manifest.token_ids, agent.exact_tokens
            if agent.layout is None and not is_edited:
                exact = len(ids)
            self._check_cache(where, agent.key, agent.cache, ids, exact)
        if saved is None:
            return
        if is_edited:
            self._check_edited(node, agent)
            return
        salt = tenant_salt(CLUSTER_KEY, saved.tenant)
        names = [
            span.block_hash
            for span in block_spans(salt, node.resources.identity.fingerprint, saved.token_ids)
        ]
        if names != [ref.block_hash for ref in saved.pieces.blocks]:
            self._fail(f"{where}: its blocks are not named by its tenant and its tokens")
        count = saved.tokens_count
        cache, layout = SimCache(count, self._world.kind), unedited_layout(saved)
        expected = self._expected_tokens(node, saved, layout)
        found = load_layout(node.resources.store, saved.tenant, saved.token_ids, layout, cache)
        loaded = found.tokens_count
        drive = self._world.nodes[node.name].drive
        if loaded != expected and not drive.hurt & {file_name(ref) for ref in saved.refs}:
            self._fail(f"{where}: only {loaded} of {expected} tokens can be read back")
        if not oracle.is_cache_of(cache, saved.token_ids[:loaded]):
            self._fail(f"{where}: its blocks do not hold what its tokens compute")

    def _check_cache(self, where, key, cache, ids, exact):
        """Check that the first `exact` tokens are exact, and the others plausible."""
        if exact >= len(ids):
            problem = "" if oracle.is_cache_of(cache, ids) else "it is of other tokens"
        else:
            problem = self._world.edits.problem(cache, ids, key)
            if not problem and oracle.exact_tokens(cache, ids) < exact:
                problem = f"fewer than {exact} of its tokens are exact"
        if problem:
            self._fail(f"{where}: its cache does not match its tokens: {problem}")
        elif cache.kind in MOVABLE:
            self._world.lineage.check_memory(where, key, cache, oracle.exact_tokens(cache, ids))

    def check_names(self, host):
        """Check that the records of a live node name their blocks."""
        for agent in host.node.resources.table if host.node is not None else ():
            if agent.saved is not None:
                self._layout(host.node, agent)

    def _layout(self, node, agent):
        try:
            return node.resources.store.layout(agent.saved)
        except CorruptDataError as error:
            self._fail(f"{node.name}: {agent.key}: {error.message}")
            return None

    def _check_edited(self, node, agent):
        """Check that an edited record describes its blocks, and that all of it can be restored."""
        where, saved = f"{node.name}: {agent.key}", agent.saved
        problem = saved.edited.problem(saved.pieces, saved.token_ids)
        if problem:
            self._fail(f"{where}: {problem}")
        layout = self._layout(node, agent)
        if layout is None:
            return
        ids, cache = saved.token_ids, SimCache(saved.tokens_count, self._world.kind)
        loaded = load_layout(node.resources.store, saved.tenant, ids, layout, cache)
        count = loaded.tokens_count
        drive, expected = self._world.nodes[node.name].drive, len(ids)
        hosts = self._world.nodes.values()
        is_cut = saved.provenance.truncated_by in (TruncatedBy.FSCK, TruncatedBy.HIBERNATED)
        is_cut &= any(host.drive.hurt for host in hosts)
        if is_cut or any(host.drive.has_been_full for host in hosts):
            # A record that was truncated, or saved late, lacks windows at its end.
            expected = restorable(layout, self._world.kind.spec.window_tokens).tokens_count
        if count != expected and not drive.hurt & {file_name(ref) for ref in saved.refs}:
            self._fail(f"{where}: only {count} of {expected} edited tokens can be read back")
        exact = min(saved.edited.exact_tokens, count)
        self._check_cache(where, agent.key, cache, ids[:count], exact)
        hot = agent.cache if agent.is_durable and count == len(ids) else None
        if hot is not None and not oracle.are_alike(hot, cache):
            self._fail(f"{where}: its cache differs from its saved blocks")

    def _expected_tokens(self, node, saved, layout):
        """Return how many tokens of a record must be restored: all, unless drives lost some.

        A truncated record may end where neither a state nor windows were kept, or lack those of
        its end. The blocks that it lists must be good.
        """
        truncated_by, count = saved.provenance.truncated_by, saved.tokens_count
        hurt = [name for host in self._world.nodes.values() for name in host.drive.hurt]
        if not count:  # it names the owner only
            return 0
        is_derived = saved.key in self._world.watch.derived_cuts
        is_derived |= self._world.lineage.was_cut(saved.key)
        if truncated_by is TruncatedBy.FSCK and not (hurt or is_derived):
            self._fail(f"{node.name}: {saved.agent} was truncated, and no drive has lost a block")
        # A copy under another name lacks the reason; a truncation by the client is no loss.
        is_cut = truncated_by in (TruncatedBy.FSCK, TruncatedBy.HIBERNATED)
        is_cut &= bool(hurt) or is_derived
        if not is_cut and not self._at_end(node, saved) & {_hash_of(name) for name in hurt}:
            return count
        return node.resources.store.restorable(layout).tokens_count

    def _at_end(self, node, saved):
        """Return the hashes of the state and windows from which a record's end would resume."""
        ids, store = saved.token_ids, node.resources.store
        salt, spans = store.salt(saved.tenant), store.spans(saved.tenant, ids)
        needed = [span.in_group(salt, CacheGroup.WINDOW) for span in spans]
        needed.append(store.state_span(saved.tenant, ids, spans, len(ids)))
        return {span.block_hash.hex() for span in needed}

    def _check_disks(self):
        for node in self._nodes:
            self._world.disk_judge.check_tables(node)

    def _check_erased(self):
        for name, marker in (*self._world.clients.erased, *self._world.lending.forgotten()):
            self._world.disk_judge.check_erased(name, marker)
            self._world.lineage.check_words(name, marker)
        for talk in self._world.clients.talks:
            if talk.erased_s is None:
                continue
            for node in self._nodes:
                agent = node.resources.table.get(talk.key)
                if agent is not None and agent.manifest.created_s < WALL_S + talk.erased_s - 1:
                    self._fail(f"{talk.name}: erased, and back on {node.name}")

    def _check_directory(self):
        """Check that the directory has every agent's owner, and that no claim is undecided."""
        directory = self._world.router.services.fleet.directory
        if directory.undecided_agents():
            self._fail(f"still in doubt in the quiet state: {directory.undecided_agents()}")
        owners = {}
        for node in self._nodes:
            for agent in node.resources.table:
                record = agent.manifest
                if record.state is OwnerState.SEALED:
                    self._fail(f"{node.name}: {agent.key} stays sealed")
                if record.state is OwnerState.OWNED:
                    owners[agent.key] = max(
                        owners.get(agent.key, (0, "")), (record.epoch, node.name)
                    )
        for key, (epoch, name) in owners.items():
            owner = directory.owner(key)
            if owner is None or (owner.epoch, owner.node) != (epoch, name):
                self._fail(f"the directory has {owner} for {key}, which {name} owns at {epoch}")

    def _check_leftovers(self):
        services = self._world.router.services
        leftovers = {
            "reservations": services.fleet.directory._reserved,
            "moves": services.moves._running,
            "turns booked": {n for n in self._world.nodes if services.fleet.ledger.turns(n)},
        }
        for node in self._nodes:
            leftovers[f"{node.name}: turns"] = list(node.live_turns)
            leftovers[f"{node.name}: sequences"] = list(node.resources.engine._queue)
            leftovers[f"{node.name}: memory granted"] = node.resources.engine.budget.reserved_bytes
            leftovers[f"{node.name}: blocks adopted"] = pinned_blocks(node)
            if not self._world.chaos.has_faults:  # else an offer may last until it expires
                leftovers[f"{node.name}: offers"] = node.resources.transfers.offers.agents()
            leftovers[f"{node.name}: room promised"] = +node.tiers.budget.pending
            leftovers[f"{node.name}: pins"] = node.resources.store.blocks._index._pins
            busy = [agent.key for agent in node.resources.table if agent.is_busy]
            leftovers[f"{node.name}: turn locks"] = busy
        for what, items in leftovers.items():
            if items:
                self._fail(f"left over: {what}: {items}")


def _hash_of(name):
    """Return the block hash in the name of a block file."""
    return name.removeprefix("blocks/").partition("-")[0]
