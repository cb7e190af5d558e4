"""Record of one run: troubles, evictions, acknowledgements and epochs, judged as they happen.

Facts come from the outside (the clients' answers, the drives) and from a few places inside the
nodes where something becomes a promise. They excuse exactly the agents that they touch.
"""

import contextlib
from collections import defaultdict
from unittest import mock

from fabric.control.calls import decode_reply
from fabric.control.node_calls import Done, ReleaseAgent
from fabric.record.manifest import OwnerState
from fabric.record.stored_part import without_edited
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
        self.trouble_s = {}  # when something last happened to a process
        self._cuts = defaultdict(int)  # how many last
        self.evicted = defaultdict(set)  # by agent: the nodes that let it go, or may have
        self._evicted_s = {}  # (agent, node): when that was last begun, or done
        self._hurt_s = {}  # by agent: when a block of its record was last damaged
        self.derived_cuts = set()  # agents whose record lost what was borrowed of erased ones
        self.released = {}  # (node, life, agent): the epoch at which another owns it
        self._finished = defaultdict(list)  # operation: (node, epoch, when) that acknowledged it
        self._hosts = defaultdict(dict)  # by agent: each node that had it, when it last got it
        self._owners = {}  # (agent, epoch): who acknowledged it: node, life, durable or not
        self._admitted = {}  # (agent, router's life): the highest epoch that its clients saw

    # --- what happens ------------------------------------------------------------------------

    def on_trouble(self, name, change=0):
        """Note that a process was killed or hung, or that a cut begins (1) or ends (-1)."""
        self.trouble_s[name] = self._world.loop.now_s
        self._cuts[name] += change

    def was_well_since(self, name, since_s):
        """Say whether nothing happened to a process since then; one that starts is not well."""
        host = self._world.nodes.get(name, self._world.router)
        is_quiet = self.trouble_s.get(name, -1.0) < since_s and not self._cuts[name]
        return is_quiet and host.is_serving

    def note_evicted(self, key, name):
        """Note that a node lets an agent go, or may have."""
        self.evicted[key].add(name)
        self._evicted_s[key, name] = self._world.loop.now_s

    def _note_gone(self, key, name):
        """Note that a node dropped an agent; one that no node has begins at epoch 1 again."""
        self.note_evicted(key, name)
        self.released.pop((name, self._world.nodes[name].incarnation, key), None)

    def was_evicted(self, key, name, since_s):
        """Say whether a node has let an agent go since then, or has not had it again since.

        A turn that began it anew may have ended before its client sees it begin.
        """
        return name in self.evicted[key] or self._evicted_s.get((key, name), -1.0) >= since_s

    def note_hurt(self, key):
        """Note that a block of the record that an agent has by now is damaged."""
        self._hurt_s[key] = self._world.loop.now_s

    def was_hurt(self, key, since_s):
        """Say whether that was so since then: its record may be a later one than acknowledged."""
        return self._hurt_s.get(key, -1.0) >= since_s

    def on_host(self, key, name):
        """Note that a node has an agent now, by a client's word or its disk's."""
        self._hosts[key][name] = self._world.loop.now_s

    def hosts_since(self, key, since_s):
        """Name the nodes that got an agent since then."""
        return {name for name, at_s in self._hosts[key].items() if at_s >= since_s}

    def on_call(self, host, call):
        """Note a control call before the node handles it."""
        if not isinstance(call, ReleaseAgent) or host.node is None:
            return
        agent = host.node.resources.table.get(call.key)
        if agent is not None and agent.manifest.epoch < call.epoch:
            name = (host.name, host.incarnation, agent.key)
            self.released[name] = max(call.epoch, self.released.get(name, 0))

    def on_stopped(self, host, raw):
        """Judge a node that says that it has saved everything."""
        reply = decode_reply(Done, raw)
        if host.node is None or not isinstance(reply, Done) or "in memory only" in reply.detail:
            return
        left = [agent.key for agent in host.node.resources.table if agent.is_unsaved]
        if left and host.node.health.degraded is None:
            self._world.fail(f"{host.name} has stopped and not saved {left}")

    def on_admitted(self, tenant, event, router):
        """Note an epoch that the router has let a client see."""
        name = (tenant, event.agent, router.incarnation)
        if event.epoch > self._admitted.get(name, (0, 0.0))[0]:
            self._admitted[name] = event.epoch, self._world.loop.now_s
        self.on_host((tenant, event.agent), event.node)

    def finisher(self, operation, admitted):
        """Return who acknowledged a turn, the epoch and when: who took it, or got it by a move.

        An operation that was sent again may have ended at several nodes. What is heard late was
        true when it was said.
        """
        taken = (admitted.node, admitted.epoch)
        ends = self._finished.get(operation, [(*taken, self._world.loop.now_s)])
        return next((end for end in ends if end[:2] == taken), ends[-1])

    def check_fence(self, talk, admitted, operation, router):
        """Judge an acknowledgement: no later epoch may have been given out before.

        Unless that began with a move: it has what was acknowledged, however late that is heard.
        Nor one given out after the node had answered, as after an erasure. Epochs of failed moves
        belong to no node.
        """
        node, epoch, finished_s = self.finisher(operation, admitted)
        name = (talk.tenant, admitted.agent, router.incarnation)
        issued, issued_s = self._admitted.get(name, (0, 0.0))
        key, disk_judge = (talk.tenant, admitted.agent), self._world.disk_judge
        between = {(key, later) for later in range(epoch + 1, issued)} & disk_judge.owned
        is_late = issued > epoch and issued_s <= finished_s
        if is_late and not between | {(key, issued)} <= disk_judge.moved:
            self._world.fail(
                f"{talk.name}: {node} acknowledges at epoch {epoch} what was given out at {issued}"
            )

    # --- inside the nodes --------------------------------------------------------------------

    @contextlib.contextmanager
    def taps(self):
        """Listen to what nodes acknowledge and let go."""
        emit, evict, leave = Turn._emit, AgentStore.evict, Eviction.evict
        shed = AgentTable.shed

        def emitted(turn, event):
            if isinstance(event, Admitted):
                turn.seen_epoch = event.epoch, (turn._request.tenant, event.agent)
            elif isinstance(event, Finished) and not turn._request.tenant.startswith("_"):
                self._on_finished(turn, is_durable=event.durable)
            emit(turn, event)

        def evicted(store, records):
            self._on_evict(store, records)
            evict(store, records)

        async def left(eviction, chosen):
            node = next(h.node for h in self._living() if h.node.tiers.eviction is eviction)
            keys = [agent.key for agent in chosen]
            before = {key for key in keys if node.name not in self.evicted[key]}
            for key in keys:
                self.note_evicted(key, node.name)  # a power loss may leave either
            count = await leave(eviction, chosen)
            for agent in chosen:
                if not agent.was_evicted and agent.key in before:
                    self.evicted[agent.key].discard(node.name)
                elif agent.was_evicted:
                    self._note_gone(agent.key, node.name)
                    self._world.note(f"{node.name}: evicted {agent.key}")
            return count

        def forgotten(table, budget_bytes):
            name = next(h.name for h in self._living() if h.node.resources.table is table)
            before = {agent.key for agent in table}
            shed(table, budget_bytes)
            for key in before - {agent.key for agent in table}:
                self._note_gone(key, name)  # no disk has ever taken it

        with (
            mock.patch.object(Turn, "_emit", emitted),
            mock.patch.object(derived_memory, "without_edited", self._cut_derived),
            mock.patch.object(manifest_store, "without_edited", self._cut_derived),
            mock.patch.object(hibernation_import, "without_edited", self._cut_derived),
            mock.patch.object(AgentTable, "shed", forgotten),
            mock.patch.object(AgentStore, "evict", evicted),
            mock.patch.object(Eviction, "evict", left),
        ):
            yield

    def _cut_derived(self, record):
        self.derived_cuts.add(record.key)
        return without_edited(record)

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
        is_left = other in self.evicted[key]
        # What was in memory only went with its process.
        is_left |= not was_durable and self._world.nodes[other].incarnation != its_life
        if other != node.name and not is_left:
            self._world.fail(f"{other} and {node.name} acknowledge {key} at epoch {epoch}")
        was_durable &= other == node.name
        self._owners[key, epoch] = (node.name, life, is_durable or was_durable)
        if is_durable:
            self.evicted[key].discard(node.name)  # its disk has it again

    def _on_evict(self, store, records):
        """Judge who goes: an agent that is at work, sealed or not saved stays."""
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
