"""Import of one agent from a file as it arrives; owned once the whole file is verified.

Until then no record refers to the stored blocks: a failure leaves the node as it was.
"""

import threading
from dataclasses import dataclass, replace

from fabric.control.hibernation_calls import Resume, Resumed
from fabric.errors import (
    ConflictError,
    CorruptDataError,
    RetryLaterError,
    TooLargeError,
)
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import FILE_ALIGN_BYTES
from fabric.ports import Clock
from fabric.record.hibernation_file import (
    LEAD_BYTES_MAX,
    FrameKind,
    FrameReader,
    HibernationHeader,
    SignedWith,
    caller_signing_key,
    fabric_signing_key,
    open_reader,
    peek_header,
    require_sound,
)
from fabric.record.lenders import Lender
from fabric.record.manifest import OwnerState, decode_manifest
from fabric.record.rekey import RekeyedRecord, derived_from, rekey_record, with_new_owner
from fabric.record.stored_part import truncate_before_edits
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.store.block_files import require_finite
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords
from node.tiers.disk_budget import DiskBudget


@dataclass(frozen=True, slots=True)
class Imports:
    """Imports of agents from hibernation files."""

    identity: NodeIdentity
    clock: Clock
    records: AgentRecords
    budget: DiskBudget
    erased: TombstoneStore
    service_time: ServiceTime
    health: Health

    def begin(self, call: Resume) -> "Import":
        """Begin an import, which the caller must commit or abandon."""
        return Import(self, call)


class Import:
    """Hibernation file being read; `feed` and `abandon` run on worker threads."""

    def __init__(self, parts: Imports, call: Resume) -> None:
        self._parts = parts
        self._identity = parts.identity
        self._store = parts.records.store
        self._call = call
        self._working = threading.Lock()
        self._lead = b""
        self._header: HibernationHeader | None = None
        self._reader: FrameReader | None = None
        self._raw_record = bytearray()
        self._rekeyed: RekeyedRecord | None = None
        self._payload = memoryview(b"")  # payload of the incomplete block
        self._filled = 0
        self._stored: list[BlockRef] = []  # pinned until a record refers to them
        self._reused_count = 0
        self._bytes = 0

    def check_allowed(self) -> None:
        """Raise if this node must not own the agent; call it on the event loop."""
        health = self._parts.health
        health.refuse_new()
        if not health.reuses:
            message = f"{health.name} does not reuse KV caches: {health.problem}"
            raise ConflictError(message, code="no_reuse")
        _require_room_for(self._parts.records.table, self._call)

    @property
    def missing_bytes(self) -> int | None:
        """Bytes of the blocks that are not stored yet; None until the record has arrived."""
        if self._rekeyed is None:
            return None
        has = self._store.blocks.has
        missing = (ref for ref, _ in self._rekeyed.blocks if not has(ref))
        return sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)

    @property
    def _epoch(self) -> int:
        """The requested epoch, or one above an erased agent of that name."""
        return self._parts.erased.claim_epoch(self._call.tenant, self._call.agent, self._call.epoch)

    # --- the file ----------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Process the next bytes; raise RejectedError where the file is not valid."""
        with self._working:
            self._bytes += len(data)
            if self._reader is None:
                self._lead += data
                header = peek_header(self._lead)
                if header is None:
                    require_sound(len(self._lead) < LEAD_BYTES_MAX, "its header does not end")
                    return
                data, self._lead = self._lead, b""
                self._reader = self._open(header)
            for frame in self._reader.feed(data):
                if frame.kind is FrameKind.RECORD:
                    self._add_record(frame.body)
                elif frame.kind is FrameKind.BLOCK:
                    self._add_block(frame.body)

    def finish(self) -> None:
        """Raise RejectedError unless the file is complete."""
        with self._working:
            (self._reader or FrameReader(None)).finish()
            rekeyed_record = self._record()
            require_sound(len(self._stored) == len(rekeyed_record.blocks), "it lacks blocks")

    def abandon(self) -> None:
        """Remove the blocks of a file that was not committed."""
        with self._working:
            refs, self._stored = self._stored, []
            self._store.blocks.abandon(refs)
            self._store.sweep()

    def _open(self, header: HibernationHeader) -> FrameReader:
        identity, call = self._identity, self._call
        if header.signed_with is SignedWith.FABRIC:
            if header.tenant != call.tenant:
                message = "the hibernation file belongs to another tenant"
                raise ConflictError(message, code="other_tenant")
            key = fabric_signing_key(identity.cluster_key, call.tenant)
        elif call.signing_key is None:
            message = "the hibernation file is signed with a client's key: give that key"
            raise ConflictError(message, code="key_required")
        else:
            key = caller_signing_key(call.signing_key)
        reader = open_reader(header, key)
        if header.fingerprint != identity.fingerprint:
            message = f"the file is for another model ({header.model}) than {identity.name} runs"
            raise ConflictError(message, code="fingerprint_mismatch")
        if header.payload_bytes > identity.settings.disk_bytes:
            message = "the agent's KV cache is larger than this node's disk budget"
            raise TooLargeError(message)
        self._header = header
        return reader

    def _add_record(self, body: bytes) -> None:
        header = self._header
        assert header is not None, "the reader was opened with it"
        self._raw_record += body
        require_sound(len(self._raw_record) <= header.record_bytes, "its record is too long")
        if len(self._raw_record) < header.record_bytes:
            return
        try:
            record = decode_manifest(bytes(self._raw_record))
        except CorruptDataError as error:
            require_sound(holds=False, why=error.message)
            raise
        self._raw_record = bytearray()
        salt, model = self._store.salt(self._call.tenant), self._identity.model
        self._rekeyed = rekey_record(record, header, model.spec, salt, model.vocabulary_size)

    def _add_block(self, body: bytes) -> None:
        rekeyed_record = self._record()
        require_sound(len(self._stored) < len(rekeyed_record.blocks), "it has too many blocks")
        ref, span = rekeyed_record.blocks[len(self._stored)]
        if not self._filled:
            self._payload = memoryview(bytearray(ref.payload_bytes))
        end = self._filled + len(body)
        require_sound(end <= ref.payload_bytes, "a block is too long")
        self._payload[self._filled : end] = body
        self._filled = end
        if end < ref.payload_bytes:
            return
        blocks, tokens = self._store.blocks, span.tokens_in(rekeyed_record.record.token_ids)
        is_known = blocks.has(ref)
        try:
            require_finite(self._identity.spec, ref.group, ref.tokens_count, self._payload)
            blocks.adopt(ref, span.parent, tokens, self._payload)
        except CorruptDataError as error:
            require_sound(holds=False, why=error.message)
            raise
        if ref in self._stored:  # a block of several pieces takes one pin
            blocks.abandon([ref])
        self._reused_count += is_known
        self._stored.append(ref)
        self._payload, self._filled = memoryview(b""), 0

    def _record(self) -> RekeyedRecord:
        require_sound(self._rekeyed is not None, "its record is incomplete")
        assert self._rekeyed is not None, "checked above"
        return self._rekeyed

    # --- the agent ---------------------------------------------------------------------------

    async def commit(self) -> Resumed:
        """Publish the record as owner, which is the commit; turns of the agent wait for it."""
        table, call = self._parts.records.table, self._call
        agent = _require_room_for(table, call)
        if agent is None:
            agent = table.create(*call.key, None, self._epoch)
        async with agent.turn_lock:
            try:
                await self._publish(agent)
            finally:
                if agent.is_blank:
                    table.forget(agent)  # a publish that failed
        return Resumed(agent.view(), len(self._record().blocks), self._reused_count, self._bytes)

    async def _publish(self, agent: Agent) -> None:
        parts, call, record = self._parts, self._call, self._record().record
        if record.agent != call.agent:
            digest = parts.erased.digest(call.tenant, record.agent)
            record = derived_from(record, Lender(digest, record.epoch))
        owned = with_new_owner(
            record,
            call.key,
            self._identity.name,
            self._epoch,
            parts.clock.wall_s(),
        )
        served = parts.service_time.stamp()
        owned = replace(owned, provenance=replace(owned.provenance, served=served))
        previous = agent.saved
        if parts.erased.is_derived(owned):
            owned = truncate_before_edits(owned)
        if owned.refs != self._record().record.refs:
            unneeded = set(self._stored).difference(owned.refs)
            parts.records.store.blocks.abandon(unneeded)
        self._stored = []  # publishing releases the pins, whether it succeeds or not
        await parts.records.publish(owned, previous)
        first = len(owned.edited.origins) if owned.edited is not None else 0
        chain = tuple(span for _, span in self._record().blocks[first : len(owned.pieces)])
        agent.manifest = owned  # neither the file's pin nor the replaced agent's is kept
        agent.note_saved(owned, chain)
        agent.came_from_peer, agent.cache, agent.last_match = False, None, None
        agent.outgoing.note_owned_here()
        parts.records.put(agent)


def _require_room_for(table: AgentTable, call: Resume) -> Agent | None:
    """Return the idle agent to replace, if any; raise if it must not be replaced."""
    agent = table.get(call.key)
    if agent is None:
        table.require_room()
        return None
    record = agent.effective_record
    if record.state is OwnerState.SEALED:
        message = "the agent with that name is being moved; retry later"
        raise ConflictError(message, code="migration_in_progress")
    if record.state is OwnerState.OWNED and not call.replace:
        message = (
            f"an agent named {call.agent!r} exists already: replace it, or choose another name"
        )
        raise ConflictError(message, code="agent_exists")
    if record.epoch >= call.epoch:
        message = (
            f"a later record of the agent is stored here: epoch {record.epoch}, not {call.epoch}"
        )
        raise ConflictError(message, code="stale_epoch")
    if agent.is_busy:
        message = "a turn of the agent with that name is running; retry later"
        raise RetryLaterError(message, code="agent_busy")
    return agent
