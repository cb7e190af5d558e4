"""The control side of a fake node: ownership, epochs and moves as a real node keeps them."""

import asyncio
import json
import time
from dataclasses import replace

from xxhash import xxh3_64_hexdigest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.node_calls import (
    ASLEEP,
    DRAINING,
    READY,
    AbortMigration,
    AgentList,
    AgentSketch,
    AgentView,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Describe,
    Done,
    Flush,
    ListAgents,
    NodeView,
    Offer,
    OfferMigration,
    PinAgent,
    ReleaseAgent,
    SealAgent,
    SelfTest,
    TierBytes,
)
from fabric.control.term_calls import GrantTerm
from fabric.control.turn_calls import ReadTurns, TurnsView
from fabric.errors import ConflictError, NotFoundError, RetryLaterError, StaleEpochError
from fabric.kvcache.hashing import agent_digest
from fabric.net.links import Address, LinkKind, PeerList
from fabric.record.manifest import OwnerState
from fabric.record.tombstone import tombstone
from fabric.record.turn_history import read_turns
from tests.router.fake_copies import FakeCopies
from tests.router.fake_memory import BLOCK_CHARS, Memory, block_names


class FakeControl(FakeCopies):
    """Handlers of control calls, on the memory of a fake node."""

    def handlers(self):
        return {
            Describe: lambda _: self.view(),
            ListAgents: lambda _: self._list(),
            EraseAgent: self._erase,
            ShareErasures: self._share_erasures,
            PinAgent: self._pin,
            ReadTurns: self._read_turns,
            OfferMigration: self._offer,
            CopyBlocks: self._copy,
            SealAgent: self._seal,
            CommitMigration: self._commit,
            ReleaseAgent: self._release,
            AbortMigration: self._abort,
            PeerList: self._meet,
            Flush: self._flush,
            GrantTerm: self._grant,
            **self.copy_handlers(),
        }

    def _grant(self, call):
        now_s = time.monotonic()
        after = self.ballot.after(call, now_s)
        if after is not None and not call.is_trial:
            self.ballot = after
        return self.ballot.answer(now_s, granted=after is not None)

    def _read_turns(self, call):
        memory = self.memory.get(call.key)
        if memory is None or memory.state is not OwnerState.OWNED:
            message = "no such agent here"
            raise NotFoundError(message, code="agent_not_found")
        return TurnsView(read_turns(memory.turns))

    def _meet(self, call):
        self.peers = call.peers
        return Done()

    @property
    def state(self):
        if self.is_asleep:
            return ASLEEP
        return DRAINING if self.is_draining else READY

    def view(self):
        text = sum(len(m.text) for m in self.memory.values())
        view = NodeView(
            name=self.name,
            host="127.0.0.1",
            pid=1,
            incarnation=self.incarnation,
            http_url=self.http_url,
            model=self.model,
            fingerprint="f" * 64,
            context_tokens_max=100_000,
            state=self.state,
            agents=len(self.memory),
            tokens=text,
            bytes=TierBytes(text, text),
            addresses=(Address("127.0.0.1", 7000, LinkKind.LOOPBACK),),
            waiting=0,
            active=self.running,
            queue_s=0.0,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=50.0,
            bytes_per_token=1024,
            self_test=SelfTest(passed=True, detail="restored", seconds=0.1),
            changes=self.changes,
            erased=self.erased.fingerprint,
            router=self.ballot.granted if self.ballot.granted.term else None,
            build={"macfabric": "0.1.0"},
        )
        return replace(view, **self.view_changes)

    def agent_view(self, memory):
        chars = len(memory.text)
        tiers = (("hot",) if memory.hot else ()) + ("disk",)
        return AgentView(
            tenant=memory.tenant,
            agent=memory.agent,
            group=memory.group,
            node=memory.owner or self.name,
            state=memory.state,
            epoch=memory.epoch,
            revision=memory.revision,
            tokens=chars,
            blocks=-(-chars // BLOCK_CHARS),
            bytes=TierBytes(chars if memory.hot else 0, chars),
            tiers=tiers,
            busy=bool(memory.busy),
            created_s=1.0,
            used_s=2.0,
            last_match=memory.last_match,
            sealed_to=memory.sealed_to,
            pinned=memory.pinned,
            pin_held=memory.pinned,
            migration=memory.migration if memory.state is OwnerState.OWNED else None,
            durable=True,
            tail=xxh3_64_hexdigest(memory.text.encode()) if chars else "",
            kept=memory.kept and memory.state is OwnerState.REPLICA,
        )

    def _list(self):
        agents = tuple(
            AgentSketch(self.agent_view(memory), tuple(memory.sketch))
            for memory in self.memory.values()
        )
        return AgentList(self.name, self.incarnation, self.changes, agents)

    def _find(self, call):
        memory = self.memory.get(call.key)
        if memory is None:
            message = f"{self.name} does not hold this agent"
            raise NotFoundError(message, code="agent_not_found")
        return memory

    def _erase(self, call):
        key = call.key
        stone = tombstone(self.cluster_key, *key, call.epoch, call.erased_s)
        self.erased.merge([stone])
        size = self._remove_erased(key)
        existed = size is not None
        blocks, size = -(-(size or 0) // BLOCK_CHARS), size or 0
        return EraseReceipt(self.name, existed, blocks, size, 0, tombstone=stone)

    def _share_erasures(self, call):
        self.erased.merge(call.erased)
        removed = [key for key in list(self.memory) if self._remove_erased(key) is not None]
        return KnownErasures(tuple(self.erased), len(removed))

    def floor(self, key):
        """Return the epoch up to which an agent is erased."""
        return self.erased.epoch_of(agent_digest(self.cluster_key, *key))

    def _remove_erased(self, key):
        memory = self.memory.get(key)
        if memory is None or memory.epoch > self.floor(key):
            return None
        del self.memory[key]
        self.changes += 1
        return len(memory.text)

    def _pin(self, call):
        memory = self._find(call)
        memory.pinned = call.pinned
        self.changes += 1
        return self.agent_view(memory)

    def _flush(self, call):
        if call.drop_hot:
            for memory in self.memory.values():
                memory.hot = False
        return Done("durable")

    def _offer(self, call):
        memory = self._find(call)
        if memory.epoch != call.epoch:
            message = f"the agent is at epoch {memory.epoch}, not {call.epoch}"
            raise StaleEpochError(message)
        if memory.state is not OwnerState.OWNED:
            message = "not owned here"
            raise ConflictError(message, code="not_owner")
        is_live = bool(self.running) and self.behaviour.hands_over
        return Offer(memory.record(), b"ticket", self.view().addresses, live=is_live)

    async def _copy(self, call):
        await asyncio.sleep(self._copy_s)
        blocks = block_names(json.loads(call.offer.manifest)["text"])
        missing = blocks - self.blocks
        self.blocks |= blocks
        return Copied(len(missing), len(blocks) - len(missing), 100 * len(missing), 0.01)

    async def _seal(self, call):
        memory = self._find(call)
        if memory.state is OwnerState.SEALED and memory.migration == call.migration:
            return Offer(memory.record(), b"ticket", ())
        if memory.epoch != call.epoch:
            message = f"the agent is at epoch {memory.epoch}, not {call.epoch}"
            raise StaleEpochError(message)
        if memory.busy and self.behaviour.hands_over:
            memory.seal = call
            while memory.busy:  # noqa: ASYNC110 - a step of a fake
                await asyncio.sleep(0.005)
            return Offer(memory.record(), b"ticket", ())
        if memory.busy:
            message = "a turn of this agent is still running"
            raise RetryLaterError(message, retry_after_s=0.05, code="agent_busy")
        self.seal_now(memory, call)
        return Offer(memory.record(), b"ticket", ())

    def seal_now(self, memory, call):
        memory.state, memory.migration = OwnerState.SEALED, call.migration
        memory.sealed_to, memory.seal = call.target, None
        self.changes += 1

    async def _commit(self, call):
        copied = await self._copy(call)
        record = json.loads(call.offer.manifest)
        key = (record["tenant"], record["agent"])
        existing = self.memory.get(key)
        if call.migration in self.aborted:
            message = "this migration was aborted"
            raise ConflictError(message, code="aborted")
        if existing and existing.epoch >= call.epoch:
            if existing.migration == call.migration:
                return Committed(self.agent_view(existing), copied)
            message = "already at that epoch"
            raise ConflictError(message, code="stale_epoch")
        memory = Memory(**record, epoch=call.epoch, hot=False, migration=call.migration)
        self.memory[key] = memory
        self.changes += 1
        return Committed(self.agent_view(memory), copied)

    def _release(self, call):
        memory = self.memory.get(call.key)
        if memory is not None and memory.epoch < call.epoch:
            memory.state, memory.epoch = OwnerState.REPLICA, call.epoch
            memory.owner = call.owner
            memory.migration = memory.sealed_to = None
            self.changes += 1
        return Done()

    def _abort(self, call):
        self.aborted.add(call.migration)
        memory = self.memory.get(call.key)
        if memory and memory.state is OwnerState.SEALED and memory.migration == call.migration:
            memory.state, memory.migration, memory.sealed_to = OwnerState.OWNED, None, None
            self.changes += 1
        return Done()
