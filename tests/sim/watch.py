"""Record of one run: troubles, evictions, acknowledgements and epochs, checked as they happen.

Events come from outside (the clients' answers, the drives) and from a few places inside the nodes
where something becomes a promise. They excuse exactly the agents that they affect.
"""

import contextlib
from collections import defaultdict
from unittest import mock

from fabric.control.calls import decode_reply
from fabric.control.node_calls import Done, ReleaseAgent
from fabric.record.manifest import OwnerState
from fabric.record.stored_part import truncate_before_edits
from fabric.turn.generation import Admitted, Finished
from node.agents.agent_table import AgentTable
from node.migration import hibernation_import
from node.store import manifest_store
from node.store.agent_store import AgentStore
from node.tiers import derived_memory
from node.tiers.eviction import Eviction
from node.turn.turn import Turn


class Watch:
    """The event record of one run."""

    def __init__(self, world):
        self._world = world
        self.trouble_s = {}  # by process: when it was last in trouble
        self._cuts = defaultdict(int)  # by process: how many cuts are in effect
        self.evicted = defaultdict(set)  # by agent: the nodes that evicted it, or may have
        self._evicted_s = {}  # (agent, node): when that last began or ended
        self._hurt_s = {}  # by agent: when a block of its record was last damaged
        self.derived_cuts = set()  # agents whose record lost rows borrowed from erased ones
        self.released = {}  # (node, life, agent): the epoch at which another node owns it
        self._finished = defaultdict(list)  # by operation: each (node, epoch, time) of its end
        self._hosts = defaultdict(dict)  # by agent: each node that had it, and when it last did
        self._owners = {}  # (agent, epoch): node, life and durability of its acknowledgement
        self._admitted = {}  # (agent, router's life): the highest epoch that clients saw, and when

    # --- events ------------------------------------------------------------------------------

    def on_trouble(self, name, change=0):
        """Record that a process was killed or hung, or that a cut begins (1) or ends (-1)."""
        self.trouble_s[name] = self._world.loop.now_s
        self._cuts[name] += change

    def was_well_since(self, name, since_s):
        """Return whether a process has had no trouble since then, and serves."""
        host = self._world.nodes.get(name, self._world.router)
        is_quiet = self.trouble_s.get(name, -1.0) < since_s and not self._cuts[name]
        return is_quiet and host.is_serving

    def note_evicted(self, key, name):
        """Record that a node evicted an agent, or may have."""
        self.evicted[key].add(name)
        self._evicted_s[key, name] = self._world.loop.now_s

    def _note_dropped(self, key, name):
        """Record that a node dropped an agent, which may begin at epoch 1 again."""
        self.note_evicted(key, name)
        self.released.pop((name, self._world.nodes[name].incarnation, key), None)

    def was_evicted(self, key, name, since_s):
        """Return whether a node evicted an agent since then, or evicted it and has not restored it.

        A turn that began it anew may have ended before its client sees the admission.
        """
        return name in self.evicted[key] or self._evicted_s.get((key, name), -1.0) >= since_s

    def note_hurt(self, key):
        """Record damage to a block of an agent's current record."""
        self._hurt_s[key] = self._world.loop.now_s

    def was_hurt(self, key, since_s):
        """Return whether a record of an agent was damaged since then, perhaps a later one."""
        return self._hurt_s.get(key, -1.0) >= since_s

    def on_host(self, key, name):
        """Record that a node has an agent now, as an admission or its disk shows."""
        self._hosts[key][name] = self._world.loop.now_s

    def hosts_since(self, key, since_s):
        """Return the nodes that got an agent since then."""
        return {name for name, at_s in self._hosts[key].items() if at_s >= since_s}

    def on_call(self, host, call):
        """Record a release before the node handles it."""
        if not isinstance(call, ReleaseAgent) or host.node is None:
            return
        agent = host.node.resources.table.get(call.key)
        if agent is not None and agent.manifest.epoch < call.epoch:
            name = (host.name, host.incarnation, agent.key)
            self.released[name] = max(call.epoch, self.released.get(name, 0))

    def on_stopped(self, host, raw):
        """Check that a node that reports a clean stop has saved everything."""
        reply = decode_reply(Done, raw)
        if host.node is None or not isinstance(reply, Done) or "in memory only" in reply.detail:
            return
        unsaved = [agent.key for agent in host.node.resources.table if agent.is_unsaved]
        if unsaved and host.node.health.degraded is None:
            self._world.fail(f"{host.name} has stopped without saving {unsaved}")

    def on_admitted(self, tenant, event, router):
        """Record the epoch of an admission that a client has seen."""
        name = (tenant, event.agent, router.incarnation)
        if event.epoch > self._admitted.get(name, (0, 0.0))[0]:
            self._admitted[name] = event.epoch, self._world.loop.now_s
        self.on_host((tenant, event.agent), event.node)

    def find_end(self, operation, admitted):
        """Return the node, epoch and time of a turn's acknowledgement.

        The node is the one that admitted the turn, or the one it moved to. A repeated operation
        may have ended at several nodes.
        """
        admitted_at = (admitted.node, admitted.epoch)
        ends = self._finished.get(operation, [(*admitted_at, self._world.loop.now_s)])
        return next((end for end in ends if end[:2] == admitted_at), ends[-1])

    def check_fence(self, talk, admitted, operation, router):
        """Check that no later epoch was issued before a turn was acknowledged.

        An epoch that began with a move is fine, since the move brought the turn along; so is one
        issued after the acknowledgement, as after an erasure. Epochs of failed moves belong to no
        node.
        """
        node, epoch, finished_s = self.find_end(operation, admitted)
        name = (talk.tenant, admitted.agent, router.incarnation)
        issued, issued_s = self._admitted.get(name, (0, 0.0))
        key, disk_judge = (talk.tenant, admitted.agent), self._world.disk_judge
        between = {(key, later) for later in range(epoch + 1, issued)} & disk_judge.owned
        is_late = issued > epoch and issued_s <= finished_s
        if is_late and not between | {(key, issued)} <= disk_judge.moved:
            self._world.fail(
                f"{talk.name}: {node} acknowledges at epoch {epoch} after {issued} was issued"
            )

    # --- inside the nodes --------------------------------------------------------------------

    @contextlib.contextmanager
    def taps(self):
        """Record what nodes acknowledge and evict."""
        emit, evict, evict_agents = Turn._emit, AgentStore.evict, Eviction.evict
        shed = AgentTable.drop_unsaved

        def emitted(turn, event):
            if isinstance(event, Admitted):
                turn.seen_epoch = event.epoch, (turn._request.tenant, event.agent)
            elif isinstance(event, Finished) and not turn._request.tenant.startswith("_"):
                self._on_finished(turn, is_durable=event.durable)
            emit(turn, event)

        def evicted(store, records):
            self._on_evict(store, records)
            evict(store, records)

        async def agents_evicted(eviction, chosen):
            node = next(h.node for h in self._living() if h.node.tiers.eviction is eviction)
            keys = [agent.key for agent in chosen]
            before = {key for key in keys if node.name not in self.evicted[key]}
            for key in keys:
                self.note_evicted(key, node.name)  # a power loss may leave either
            count = await evict_agents(eviction, chosen)
            for agent in chosen:
                if not agent.was_evicted and agent.key in before:
                    self.evicted[agent.key].discard(node.name)
                elif agent.was_evicted:
                    self._note_dropped(agent.key, node.name)
                    self._world.note(f"{node.name}: evicted {agent.key}")
            return count

        def unsaved_dropped(table, budget_bytes):
            name = next(h.name for h in self._living() if h.node.resources.table is table)
            before = {agent.key for agent in table}
            shed(table, budget_bytes)
            for key in before - {agent.key for agent in table}:
                self._note_dropped(key, name)  # never stored on any disk

        with (
            mock.patch.object(Turn, "_emit", emitted),
            mock.patch.object(derived_memory, "truncate_before_edits", self._cut_derived),
            mock.patch.object(manifest_store, "truncate_before_edits", self._cut_derived),
            mock.patch.object(hibernation_import, "truncate_before_edits", self._cut_derived),
            mock.patch.object(AgentTable, "drop_unsaved", unsaved_dropped),
            mock.patch.object(AgentStore, "evict", evicted),
            mock.patch.object(Eviction, "evict", agents_evicted),
        ):
            yield

    def _cut_derived(self, record):
        self.derived_cuts.add(record.key)
        return truncate_before_edits(record)

    def _living(self):
        return [host for host in self._world.nodes.values() if host.node is not None]

    def _on_finished(self, turn, *, is_durable):
        epoch, key = turn.seen_epoch
        node = turn._parts.prefixes.identity
        life = node.config.incarnation
        released = self.released.get((node.name, life, key), 0)
        if epoch < released:
            self._world.fail(
                f"{node.name} acknowledges {key} at epoch {epoch}, released at {released}"
            )
        end = (node.name, epoch, self._world.loop.now_s)
        self._finished[turn._request.operation].append(end)
        other, its_life, was_durable = self._owners.get((key, epoch), (node.name, life, False))
        has_dropped = other in self.evicted[key]
        # Unsaved memory is lost with its process.
        has_dropped |= not was_durable and self._world.nodes[other].incarnation != its_life
        if other != node.name and not has_dropped:
            self._world.fail(f"{other} and {node.name} acknowledge {key} at epoch {epoch}")
        was_durable &= other == node.name
        self._owners[key, epoch] = (node.name, life, is_durable or was_durable)
        if is_durable:
            self.evicted[key].discard(node.name)  # its disk has it again

    def _on_evict(self, store, records):
        """Check that no agent is evicted that is at work, sealed, offered or not saved."""
        for node in (host.node for host in self._living() if host.node.resources.store is store):
            for record in records:
                agent = node.resources.table.get(record.key)
                if agent is None:
                    continue
                is_sealed = agent.manifest.state is OwnerState.SEALED
                if is_sealed or agent.is_unsaved or agent.turn is not None:
                    what = "sealed" if is_sealed else "not saved" if agent.is_unsaved else "at work"
                    self._world.fail(f"{node.name} evicts {agent.key}, which is {what}")
                elif agent.key in node.resources.transfers.offers.agents():
                    self._world.fail(f"{node.name} evicts {agent.key}, which is offered")
