"""Fetch the blocks of one record from the node that offers them, each verified before it is stored.

A peer is not trusted: block names are recomputed from the tokens under this cluster's key.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from fabric.control.node_calls import Copied, CopyBlocks
from fabric.hosting.tracing import span
from fabric.kvcache.block_chain import BlockRef
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from node.net.connections import Connections
from node.net.link_table import LinkTable
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.transfer.client import TransferReport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetching:
    """Fetches blocks from peers; `fetch` blocks its thread."""

    identity: NodeIdentity
    clock: Clock
    store: AgentStore
    workers: Workers
    links: LinkTable
    connections: Connections
    fetch: Callable[..., TransferReport]

    async def fetch_missing(
        self,
        call: CopyBlocks,
        record: Manifest,
        on_block: Callable[[BlockRef], None],
        cancel: Event | None = None,
    ) -> Copied:
        """Fetch missing blocks; `on_block` is called on a fetch thread, once per pinned block.

        With `cancel`, a turn waits for them, and ends the fetch by setting it.
        """
        run = self.workers.fetch if cancel is None else self.workers.fetch_head
        with span("fetch", node=self.identity.name, source=call.source) as fetch_span:
            copied = await run(lambda: self._fetch_missing(call, record, on_block, cancel))
            fetch_span.note(blocks=copied.blocks_sent, bytes=copied.bytes_sent)
        blocks, seconds = copied.blocks_sent, copied.seconds
        if blocks:
            text = "%s: fetched %d blocks, %d bytes from %s in %.3f s"
            _log.info(text, call.migration, blocks, copied.bytes_sent, call.source, seconds)
        return copied

    def _fetch_missing(
        self,
        call: CopyBlocks,
        record: Manifest,
        on_block: Callable[[BlockRef], None],
        cancel: Event | None,
    ) -> Copied:
        began_s, store = self.clock.monotonic_s(), self.store
        by_name = {ref.name: span for ref, span in store.named_refs(record)}
        missing = store.missing(record)
        if not missing:
            return Copied(0, len(by_name), 0, 0.0)
        buffers: dict[str, memoryview] = {}

        def allocate(ref: BlockRef) -> memoryview:
            return buffers.setdefault(ref.name, memoryview(bytearray(ref.payload_bytes)))

        def adopt(ref: BlockRef, payload: memoryview) -> None:
            span = by_name[ref.name]
            tokens = span.tokens_in(record.token_ids)
            store.blocks.adopt(ref, span.parent, tokens, payload)
            on_block(ref)
            buffers.pop(ref.name, None)

        report = self.fetch(
            call.offer.addresses,
            name=self.identity.name,
            source=call.source,
            cluster_key=self.identity.cluster_key,
            fingerprint=self.identity.fingerprint,
            ticket=call.offer.ticket,
            refs=missing,
            allocate=allocate,
            done=adopt,
            urgency=call.urgency,
            links=self.links,
            connections=self.connections,
            encrypt_links=self.identity.settings.encrypt_links,
            cancel=cancel,
        )
        return Copied(
            blocks_sent=report.blocks,
            blocks_reused=len(by_name) - len(missing),
            bytes_sent=report.bytes,
            seconds=self.clock.monotonic_s() - began_s,
        )
