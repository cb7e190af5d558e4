"""Heads of prompts that other nodes send while the turns that need them wait.

    turn 1   names ─▶ ask the lender ─▶ fetch ─▶ ask again, while a turn there computes more
    turn 2   the same head: waits for the fetch of turn 1
    both     queue without memory meanwhile; then they look up the stored blocks again

The blocks are verified and leased like those of shared prefixes. A failure or a timeout ends the
wait: the turn computes the tokens that have not arrived.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.head_calls import HeadOffer, LentHead, OfferHead
from fabric.control.node_calls import CopyBlocks, Offer
from fabric.errors import CorruptDataError, FabricError, RejectedError, RetryLaterError
from fabric.hosting.turn_context import call_origin
from fabric.ids import BlockHash, MigrationId, NodeName, TenantId
from fabric.kvcache.block_file import payload_bytes
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS, FILE_ALIGN_BYTES, HEAD_POLL_S_MAX, HEAD_TOKENS_MAX
from fabric.net.wire import Urgency
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.piece_table import PieceTable
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import CacheTier, GenerateRequest, HeadLoan, Priority
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Head
from node.limits import (
    HEAD_FETCH_EXTRA_S,
    HEAD_FETCH_FACTOR,
    HEAD_FETCHES_MAX,
    HEAD_GRACE_POLLS,
    HEAD_START_S,
)
from node.migration.prefix_target import SharedPrefixTarget
from node.net.link_table import LinkTable
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.store.agent_store import AgentStore
from node.transfer.peer_calls import AskNode
from node.turn.prepared import Prepared

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class HeadFetch:
    """Fetch of a head, shared by all turns that wait for it."""

    tenant: TenantId
    loan: HeadLoan
    ids: Sequence[int]  # tokens of the prompt for which it was begun
    names: tuple[BlockHash, ...]  # names of the prompt's blocks, as far as they may be fetched
    begun_tokens: int  # tokens stored here before the fetch
    end_tokens: int  # tokens stored here now
    is_urgent: bool
    name: MigrationId = field(default_factory=lambda: MigrationId(f"head-{secrets.token_hex(8)}"))
    waiting: set[Head] = field(default_factory=set)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: threading.Event = field(default_factory=threading.Event)

    def common_tokens(self, head: Head) -> int:
        """Return how many tokens of whole blocks a prompt shares with the fetched one."""
        return common_prefix(self.names, head.names) * BLOCK_TOKENS

    def note_progress(self, coming_tokens: int) -> None:
        """Note the end of the incoming tokens, for each turn that waits for them."""
        for head in self.waiting:
            common = self.common_tokens(head)
            has_more = min(self.end_tokens, common) > head.stored_tokens
            head.has_grown = head.has_grown or has_more
            end = min(coming_tokens, common)
            head.coming_tokens = end if end > self.end_tokens else 0


@dataclass(slots=True, eq=False)
class HeadWait:
    """A turn's wait for blocks from other nodes."""

    head: Head
    task: asyncio.Task[None] | None = None
    fetches: list[HeadFetch] = field(default_factory=list)

    def note_fetched(self, prepared: Prepared) -> Prepared:
        """Return the prefix that the turn found, with the tokens that came from other nodes."""
        ranges = [(fetch.begun_tokens, fetch.end_tokens) for fetch in self.fetches]
        fetched = sum(max(0, min(end, prepared.cached) - start) for start, end in ranges)
        if not fetched:
            return prepared
        return replace(prepared, tier=CacheTier.PEER, fetched_tokens=fetched)


class FetchedHeads:
    """Heads that are being fetched; used on the node's event loop."""

    def __init__(
        self,
        identity: NodeIdentity,
        store: AgentStore,
        engine: EngineThread,
        links: LinkTable,
        target: SharedPrefixTarget,
        ask: AskNode,
        health: Health,
    ) -> None:
        """Use `ask` to send calls to other nodes."""
        self._identity = identity
        self._store = store
        self._engine = engine
        self._links = links
        self._target = target
        self._ask = ask
        self._health = health
        self._fetches: set[HeadFetch] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, agent: Agent, request: GenerateRequest, head: Head | None) -> HeadWait | None:
        """Begin to wait for the part of a prompt that another node has; None if there is none.

        The turn may be queued meanwhile: it gets no memory until the wait is over.
        """
        if head is None or not (head.waits and head.names):
            return None
        if not self._health.reuses or self._health.degraded is not None:
            return None
        loan = request.head
        if loan is not None and loan.source == self._identity.name:
            loan = None
        if loan is None and self._joinable(head, head.stored_tokens) is None:
            return None
        wait = HeadWait(head)
        head.coming_tokens = len(head.names) * BLOCK_TOKENS
        is_urgent = request.priority is Priority.INTERACTIVE
        wait.task = self._spawn(self._await_blocks(wait, agent.key[0], loan, is_urgent=is_urgent))
        return wait

    def leave(self, wait: HeadWait) -> None:
        """End a turn's wait; a fetch ends with the last turn that waits for it."""
        wait.head.coming_tokens = 0
        if wait.task is not None:
            wait.task.cancel()
        for fetch in wait.fetches:
            fetch.waiting.discard(wait.head)
            if not fetch.waiting:
                fetch.cancel.set()

    async def close(self) -> None:
        """Cancel all fetches, and wait until they have ended."""
        for fetch in self._fetches:
            fetch.cancel.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- one turn ----------------------------------------------------------------------------

    async def _await_blocks(
        self, wait: HeadWait, tenant: TenantId, loan: HeadLoan | None, *, is_urgent: bool
    ) -> None:
        """Wait for a fetch that another turn has begun, then for one of its own."""
        head, had_tokens = wait.head, wait.head.stored_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        try:
            joined = self._joinable(head, had_tokens)
            if joined is not None:
                had_tokens = await self._await_fetch(wait, joined, had_tokens)
            is_whole = had_tokens >= len(head.names) * BLOCK_TOKENS
            was_requested = joined is not None and joined.common_tokens(head) > had_tokens
            if loan is None or is_whole or was_requested or len(self._fetches) >= HEAD_FETCHES_MAX:
                return
            names = head.names[: HEAD_TOKENS_MAX // BLOCK_TOKENS]
            fetch = HeadFetch(tenant, loan, head.ids, names, had_tokens, had_tokens, is_urgent)
            self._fetches.add(fetch)
            self._spawn(self._run(fetch))
            await self._await_fetch(wait, fetch, had_tokens)
        finally:
            head.coming_tokens = 0
            self._engine.wake()

    def _joinable(self, head: Head, had_tokens: int) -> HeadFetch | None:
        """Return the running fetch that shares most with a prompt, and more than `had_tokens`."""
        best, most = None, had_tokens
        for fetch in self._fetches:
            common = fetch.common_tokens(head)
            if common > most and not fetch.cancel.is_set():
                best, most = fetch, common
        return best

    async def _await_fetch(self, wait: HeadWait, fetch: HeadFetch, had_tokens: int) -> int:
        """Wait for a fetch; return how many tokens of the prompt are stored here afterwards."""
        head = wait.head
        fetch.waiting.add(head)
        wait.fetches.append(fetch)
        await fetch.is_over.wait()
        stored_tokens = max(had_tokens, min(fetch.end_tokens, fetch.common_tokens(head)))
        head.has_grown = head.has_grown or stored_tokens > had_tokens
        return stored_tokens

    # --- one fetch ---------------------------------------------------------------------------

    async def _run(self, fetch: HeadFetch) -> None:
        try:
            await self._fetch_all(fetch)
        except (FabricError, OSError) as error:
            reason = getattr(error, "code", type(error).__name__)
            _log.info("cannot fetch a head from %s: %s", fetch.loan.source, reason)
        except Exception:  # noqa: BLE001 - optional: the turn computes it
            _log.exception("fetching a head failed")
            self._health.note_failed_round()
        finally:
            self._fetches.discard(fetch)
            fetch.is_over.set()

    async def _fetch_all(self, fetch: HeadFetch) -> None:
        """Request offers and fetch until the source neither stores nor computes more."""
        loan, me = fetch.loan, self._identity.name
        wait_s, grace_polls = (HEAD_POLL_S_MAX, HEAD_GRACE_POLLS) if loan.is_coming else (0.0, 0)
        end = len(fetch.names) * BLOCK_TOKENS
        while fetch.end_tokens < end and not fetch.cancel.is_set():
            had = fetch.end_tokens
            call = OfferHead(
                fetch.name, me, fetch.tenant, fetch.names, had, wait_s, fetch.is_urgent
            )
            offer = await self._request_offer(loan, call)
            lent = offer.head
            if fetch.cancel.is_set():
                return
            if lent is not None and lent.tokens > had:
                self._require_sooner(fetch, lent, max(lent.tokens, offer.coming_tokens) - had)
                await self._take(fetch, lent)
            if offer.coming_tokens or lent is not None:
                fetch.note_progress(offer.coming_tokens)
            self._engine.wake()
            may_arrive = grace_polls > 0 or (loan.is_coming and offer.is_preparing)
            is_awaited = may_arrive and fetch.end_tokens == fetch.begun_tokens
            grace_polls -= 1
            if max(offer.coming_tokens, had) <= fetch.end_tokens and not is_awaited:
                return
            wait_s = HEAD_POLL_S_MAX

    async def _request_offer(self, loan: HeadLoan, call: OfferHead) -> HeadOffer:
        raw_call = encode_call(call, origin=call_origin())
        raw = await self._ask(loan.source, loan.addresses, raw_call, call.wait_s)
        reply = decode_reply(HeadOffer, raw)
        if isinstance(reply, ErrorReply):
            raise RetryLaterError(reply.message, code=reply.code)
        return reply

    async def _take(self, fetch: HeadFetch, lent: LentHead) -> None:
        """Fetch the offered blocks within a multiple of the expected time; raise FabricError."""
        record, source = self._record(fetch, lent), fetch.loan.source
        missing = self._store.missing(record)
        size_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)
        expected_s = size_bytes / self._bytes_per_s(source, lent)
        offer = Offer(b"", lent.ticket, lent.addresses)
        copy = CopyBlocks(fetch.name, source, offer, Urgency.FETCH)
        task = self._spawn(self._target.take_head(copy, record, fetch.cancel))
        limit_s = HEAD_FETCH_EXTRA_S + HEAD_FETCH_FACTOR * expected_s
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done:  # the task ends by itself, and releases its blocks
            fetch.cancel.set()
            task.add_done_callback(_read_error)
            message = f"the blocks have not arrived within {limit_s:.1f} s"
            raise RetryLaterError(message, code="slow")
        fetch.end_tokens = max(fetch.end_tokens, task.result())
        if fetch.end_tokens < record.tokens_count:
            message = "the connection broke before the last block"
            raise RetryLaterError(message, code="broken")

    def _require_sooner(self, fetch: HeadFetch, lent: LentHead, tokens: int) -> None:
        """Raise RetryLaterError if computing `tokens` here takes no longer than fetching them."""
        tokens_per_s = self._engine.prefill_speed.per_s
        size_bytes = tokens * self._store.spec.bytes_per_token
        fetch_s = size_bytes / self._bytes_per_s(fetch.loan.source, lent)
        if fetch.end_tokens == fetch.begun_tokens:
            fetch_s += HEAD_START_S
        if tokens_per_s and fetch_s >= tokens / tokens_per_s:
            message = "computing the head takes no longer"
            raise RetryLaterError(message, code="slow_link")

    def _bytes_per_s(self, source: NodeName, lent: LentHead) -> float:
        ranked = self._links.rank(source, lent.addresses)
        return max(1.0, ranked[0][1]) if ranked else 1.0

    def _record(self, fetch: HeadFetch, lent: LentHead) -> Manifest:
        """Return the record of the lent blocks, over this node's own tokens.

        Raise RejectedError or CorruptDataError if its blocks are not those of the tokens.
        """
        ids = fetch.ids[: lent.tokens]
        count = len(ids)
        kinds = [(ref.tokens_count, ref.group) for ref in lent.blocks]
        if lent.tokens != count or count % BLOCK_TOKENS or len(kinds) * BLOCK_TOKENS != count:
            message = "a head consists of whole blocks"
            raise RejectedError(message, code="bad_offer")
        if set(kinds) != {(BLOCK_TOKENS, CacheGroup.FULL)}:
            message = "a head consists of whole blocks of full layers"
            raise RejectedError(message, code="bad_offer")
        record = Manifest(
            tenant=fetch.tenant,
            agent=lent.agent,
            fingerprint=self._identity.fingerprint,
            owner=fetch.loan.source,
            epoch=lent.epoch,
            revision=1,
            state=OwnerState.REPLICA,
            text="",
            token_ids=U32s(ids),
            token_ends=U32s([0] * count),
            prompt_tokens_count=0,
            pieces=PieceTable().append(lent.blocks),
            windows=lent.windows,
            states=lent.states,
        )
        for ref in record.refs:
            if ref.payload_bytes != payload_bytes(self._store.spec, ref.tokens_count, ref.group):
                message = f"a block of {ref.payload_bytes} bytes is not of this model"
                raise CorruptDataError(message)
        return record


def _read_error(task: asyncio.Task[int]) -> None:
    if not task.cancelled():
        task.exception()
