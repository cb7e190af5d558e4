"""Export of one agent to a file, a block at a time, while it continues to serve turns."""

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

from fabric.control.hibernation_calls import Hibernate
from fabric.errors import ConflictError, RejectedError
from fabric.ids import TenantId
from fabric.kvcache.block_chain import BlockRef, BlockSpan
from fabric.kvcache.hashing import token_bytes
from fabric.limits import MODEL_NAME_CHARS_MAX
from fabric.ports import Clock
from fabric.record.hibernation_file import (
    SALT_BYTES_MAX,
    HibernationHeader,
    SignedWith,
    caller_signing_key,
    encode_file,
    fabric_signing_key,
    file_bytes,
    key_id,
)
from fabric.record.manifest import Manifest, encode_manifest
from fabric.record.rekey import portable_record
from node.agents.owned import OwnedAgents
from node.migration.source import SEAL_WAIT_S
from node.runtime.identity import NodeIdentity
from node.tiers.agent_records import AgentRecords, RecordMending
from node.tiers.flusher import Flusher

NO_TENANT = TenantId("")  # files that may leave the fabric do not name its tenants


@dataclass(frozen=True, slots=True)
class Exports:
    """Exports of agents to hibernation files."""

    identity: NodeIdentity
    clock: Clock
    records: AgentRecords
    owned: OwnedAgents
    mending: RecordMending
    flusher: Flusher

    def begin(self, call: Hibernate) -> "Export":
        """Begin an export, which the caller must close."""
        return Export(self, call)


class Export:
    """Hibernation file being written; its blocks are held until it is closed, despite new turns."""

    def __init__(self, parts: Exports, call: Hibernate) -> None:
        self._parts = parts
        self._store = parts.records.store
        self._workers = parts.records.workers
        self._call = call
        self._held: list[BlockRef] = []
        self._pieces: Iterator[bytes] = iter(())
        self._reading = threading.Lock()
        self.total_bytes = 0
        self.epoch = 0
        self.revision = 0

    async def open(self) -> None:
        """Capture the agent after its last turn; raise ConflictError if that is not on disk."""
        call = self._call
        if len(call.salt) > SALT_BYTES_MAX:
            message = f"the signing key's salt is over {SALT_BYTES_MAX} bytes"
            raise RejectedError(message, code="invalid_signing_key")
        key = self._signing_key()
        record = await self._hold()
        self.epoch, self.revision = record.epoch, record.revision
        await self._workers.run(lambda: self._prepare(record, key))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file; raise CorruptDataError at a damaged or lost block."""
        while piece := await self._workers.run(self._next):
            yield piece

    async def close(self) -> None:
        """Release the held blocks."""
        held, self._held = self._held, []
        if held:
            await self._workers.run(lambda: self._release(held))

    def _signing_key(self) -> bytes:
        signing_key = self._call.signing_key
        if signing_key is not None:
            return caller_signing_key(signing_key)
        return fabric_signing_key(self._parts.identity.cluster_key, self._call.tenant)

    async def _hold(self) -> Manifest:
        """Wait for a running turn, and hold the blocks of the last one."""
        parts, call, store = self._parts, self._call, self._store
        agent = parts.owned.require(call.key, call.epoch)
        if agent.is_unsaved:
            await parts.flusher.flush()
        async with agent.turn_lock.held(SEAL_WAIT_S):
            parts.owned.recheck(agent, call.epoch)
            if agent.saved is None or not agent.saved.token_ids or not agent.is_durable:
                message = "the agent's last turn is not on disk yet"
                raise ConflictError(message, code="nothing_saved")
            # A file without these blocks would not be a backup.
            await parts.mending.mend(agent, may_truncate=False)
            record = portable_record(agent.saved, store.spec.window_tokens)
            self._held = record.refs
            missing = store.blocks.hold(record.refs)
        if missing:
            message = f"{len(missing)} blocks of the agent are lost; its next turn recomputes them"
            raise ConflictError(message, code="blocks_missing")
        return record

    def _prepare(self, record: Manifest, key: bytes) -> None:
        call = self._call
        blocks = self._store.named_refs(record)
        leaves = call.signing_key is not None
        raw = encode_manifest(replace(record, tenant=NO_TENANT) if leaves else record)
        sizes = [ref.payload_bytes for ref, _ in blocks]
        header = HibernationHeader(
            signed_with=SignedWith.KEY if leaves else SignedWith.FABRIC,
            key_id=key_id(key),
            salt=call.salt,
            tenant=NO_TENANT if leaves else call.tenant,
            agent=record.agent,
            fingerprint=record.fingerprint,
            model=self._parts.identity.model.name[:MODEL_NAME_CHARS_MAX],
            epoch=record.epoch,
            revision=record.revision,
            tokens_count=record.tokens_count,
            blocks_count=len(sizes),
            record_bytes=len(raw),
            payload_bytes=sum(sizes),
            created_s=self._parts.clock.wall_s(),
        )
        self.total_bytes = file_bytes(header, sizes)
        self._pieces = encode_file(header, raw, self._payloads(record, blocks), key)

    def _payloads(
        self, record: Manifest, blocks: list[tuple[BlockRef, BlockSpan]]
    ) -> Iterator[memoryview]:
        """Read and verify the blocks, one at a time."""
        for ref, span in blocks:
            tokens = span.tokens_in(record.token_ids)
            packed = token_bytes(tokens)
            payload = memoryview(bytearray(ref.payload_bytes))
            cache = payload[: -len(packed)]
            self._store.blocks.load_into(ref, span.parent, tokens, [cache] if cache else [])
            payload[-len(packed) :] = packed
            yield payload

    def _next(self) -> bytes:
        with self._reading:
            return next(self._pieces, b"")

    def _release(self, held: list[BlockRef]) -> None:
        with self._reading:  # an abandoned read ends first
            self._pieces = iter(())
            self._store.blocks.release(held)
            self._store.sweep()
