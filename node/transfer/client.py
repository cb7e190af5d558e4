"""Client of the data plane: fetch blocks from one node over several streams and links at once.

All streams take ranges of blocks from one list, largest blocks first, and request the next range
before the last one has arrived, so that the pipe is never empty. Ranges of a broken link are
fetched over other links, or over the same link later. A fetch fails after it has tried every
address a bounded number of times in a row without progress.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from threading import Event

from fabric.ids import Fingerprint, NodeName
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import MIB
from fabric.net.links import Address
from fabric.net.wire import Urgency
from fabric.settings import AUTO
from node.limits import TRANSFER_STREAMS
from node.net.connections import Connections
from node.net.link_reservations import LinkBook, NominalLinks
from node.net.peer import FetchTimeouts, Peer
from node.transfer.fetch import Fetch, FetchSpec
from node.transfer.fetch_links import FetchLinks
from node.transfer.fetch_stream import FetchStream
from node.transfer.work_queue import Allocate, Done, FetchWork, pending_blocks

STREAM_BYTES_MIN = 8 * MIB  # fewer bytes arrive before a second stream of a link has started
STRIPE_BYTES_MIN = 4 * MIB  # fewer bytes are not worth a second link


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Bytes received from one address in a fetch, and its failures."""

    address: Address
    wire_bytes: int
    failures: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Counts of one fetch."""

    blocks: int
    bytes: int
    seconds: float
    streams: int
    resumed: int  # blocks continued after a broken connection
    wire_bytes: int  # payload as received: fewer if compressed, more if repeated
    links: tuple[LinkUse, ...] = ()


def fetch_blocks(  # noqa: PLR0913
    addresses: Sequence[Address],
    *,
    name: NodeName,
    source: NodeName,
    cluster_key: bytes,
    fingerprint: Fingerprint,
    ticket: bytes,
    refs: Sequence[BlockRef],
    allocate: Allocate,
    done: Done,
    urgency: Urgency = Urgency.FETCH,
    streams: int = TRANSFER_STREAMS,
    cancel: Event | None = None,
    timeouts: FetchTimeouts = FetchTimeouts(),  # noqa: B008 - frozen
    links: LinkBook | None = None,
    connections: Connections | None = None,
    encrypt_links: str = AUTO,
) -> TransferReport:
    """Fetch each distinct block of `refs` from node `source` into the buffers of `allocate`.

    Calls `allocate`, and `done` with verified bytes, once per block and from several threads; an
    error that they raise ends the fetch and is raised here. After an error no thread writes to a
    buffer. Without `links`, nominal speeds choose the links; without `connections`, all
    connections close at the end.
    """
    began_s = time.monotonic()
    blocks = pending_blocks(refs)
    total_bytes = sum(block.ref.payload_bytes for block in blocks)
    streams_max = max(1, streams)
    streams = min(streams_max, ceil(total_bytes / STREAM_BYTES_MIN))
    if not blocks:
        return TransferReport(0, 0, time.monotonic() - began_s, streams, 0, 0)
    fetch_links = FetchLinks(source, addresses, links or NominalLinks(), timeouts, began_s)
    peer = Peer(name, source, cluster_key, fingerprint, timeouts, encrypt_links)
    spec = FetchSpec(peer, ticket, urgency, allocate, done)
    pool = connections or Connections()
    fetch = Fetch(spec, fetch_links, FetchWork(blocks), pool)
    stream_links = fetch_links.spread(streams, streams_max, striped=total_bytes >= STRIPE_BYTES_MIN)
    all_links = list(fetch_links.links)
    try:
        fetch.run([FetchStream(fetch, link) for link in stream_links], cancel)
        pool.count("failed_over", any(link.failed_count for link in all_links))
    finally:
        pool.count("blocks", len(blocks) - fetch.work.open_blocks)
        pool.count("bytes", sum(link.moved_bytes for link in all_links))
        pool.count("resumed", sum(block.was_cut for block in blocks))
        if connections is None:
            pool.close()
    uses = tuple(LinkUse(x.address, x.moved_bytes, x.failed_count) for x in all_links)
    return TransferReport(
        blocks=len(blocks),
        bytes=total_bytes,
        seconds=time.monotonic() - began_s,
        streams=len(stream_links),
        resumed=sum(block.was_cut for block in blocks),
        wire_bytes=sum(use.wire_bytes for use in uses),
        links=uses,
    )
