"""A fake node's copies, prefetches and drains."""

import asyncio
import json

from fabric.control.node_calls import Done, DrainNode, Offer, PrefetchAgent
from fabric.control.replica_calls import KeepFork, KeepReplica, OfferCopy, TakeOver
from fabric.control.span_calls import OfferSpans, ReturnSpans, SpanOffers
from fabric.errors import ConflictError, RetryElsewhereError, StaleEpochError
from fabric.record.manifest import OwnerState
from tests.router.fake_memory import Memory, block_names


class FakeCopies:
    """Mixin of a fake node: handlers of calls on its memory and blocks."""

    is_draining = False
    is_asleep = False

    def copy_handlers(self):
        return {
            OfferCopy: self._offer_copy,
            OfferSpans: lambda _: SpanOffers(()),
            ReturnSpans: lambda _: Done(),
            KeepReplica: self._keep_replica,
            KeepFork: self._keep_fork,
            PrefetchAgent: self._prefetch,
            DrainNode: self._drain,
            TakeOver: self._take_over,
        }

    def refuse_new(self):
        if self.is_draining:
            message = "this node is draining"
            raise RetryElsewhereError(message, code="draining")

    def _offer_copy(self, call):
        memory = self._find(call)
        if memory.epoch != call.epoch:
            message = f"the agent is at epoch {memory.epoch}, not {call.epoch}"
            raise StaleEpochError(message)
        if memory.state is not OwnerState.OWNED:
            message = "not owned here"
            raise ConflictError(message, code="not_owner")
        plain = json.loads(memory.record()) | {"revision": memory.revision, "epoch": memory.epoch}
        return Offer(json.dumps(plain).encode(), b"ticket", ())

    def _record_of(self, call):
        record = json.loads(call.manifest)
        if call.migration in self.aborted:
            message = "this copy was aborted"
            raise ConflictError(message, code="aborted")
        if block_names(record["text"]) - self.blocks:
            message = "not all blocks are here"
            raise ConflictError(message, code="blocks_missing")
        return record

    def _keep_replica(self, call):
        record = self._record_of(call)
        key = (record["tenant"], record["agent"])
        memory = self.memory.get(key)
        if memory is not None and memory.state is not OwnerState.REPLICA:
            message = "it is owned here"
            raise ConflictError(message, code="not_a_replica")
        fields = {
            "state": OwnerState.REPLICA,
            "owner": call.source,
            "hot": False,
            "kept": call.kept,
        }
        self.memory[key] = Memory(**record, **fields)
        self.changes += 1
        return self.agent_view(self.memory[key])

    def _keep_fork(self, call):
        record = self._record_of(call)
        key = (record["tenant"], call.agent)
        memory = self.memory.get(key)
        if memory is not None and memory.migration != call.operation:
            message = "the name is taken"
            raise ConflictError(message, code="agent_exists")
        self.refuse_new()
        if memory is None:
            changed = {"agent": call.agent, "epoch": call.epoch, "group": None, "sketch": ()}
            record |= changed | {"migration": call.operation, "hot": False}
            self.memory[key] = Memory(**record)
            self.changes += 1
        return self.agent_view(self.memory[key])

    def _take_over(self, call):
        memory = self._find(call)
        memory.state, memory.owner, memory.epoch = OwnerState.OWNED, None, call.epoch
        self.changes += 1
        return self.agent_view(memory)

    async def _prefetch(self, call):
        memory = self._find(call)
        if call.cancel:
            return self.agent_view(memory)
        if memory.epoch != call.epoch:
            message = "another epoch"
            raise StaleEpochError(message)
        await asyncio.sleep(self._copy_s)
        if not memory.hot:
            memory.hot = True
            self.changes += 1
        return self.agent_view(memory)

    def _drain(self, call):
        self.is_draining = call.draining
        return Done("drains" if call.draining else "takes agents")


def owned(nodes):
    """Return the sorted pairs of agent and owner node."""
    return sorted(
        (memory.agent, node.name)
        for node in nodes.values()
        for memory in node.memory.values()
        if memory.state is OwnerState.OWNED
    )
