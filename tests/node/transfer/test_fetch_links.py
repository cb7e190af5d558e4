"""Streams and first ranges are shared among links before any of them has moved a byte."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from fabric.ids import BlockHash
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.hashing import payload_checksum
from fabric.limits import MIB
from fabric.net.links import LinkKind
from fabric.net.wire import Urgency
from node.net.connections import Connections
from node.net.link_reservations import NominalLinks
from node.net.peer import Peer
from node.transfer.fetch import Fetch, FetchSpec
from node.transfer.fetch_links import FetchLinks
from node.transfer.work_queue import FetchWork, PendingBlock
from tests.support.transfers import FINGERPRINT, HASTE, KEY, SOURCE, TARGET, loopback

BLOCK_BYTES = 9 * MIB


def links(*mbit):
    addresses = [loopback(n, LinkKind.ETHERNET, speed) for n, speed in enumerate(mbit, 1)]
    return FetchLinks(SOURCE, addresses, NominalLinks(), HASTE, 0.0)


@pytest.mark.parametrize(
    ("streams", "most", "each"),
    [(4, 4, [2, 2]), (2, 4, [1, 1]), (1, 4, [1, 1]), (3, 4, [1, 1]), (1, 1, [1])],
)
def test_every_fast_link_gets_a_stream_within_the_limit(streams, most, each):
    chosen = links(1_000, 1_000).spread(streams, most, striped=True)
    assert [chosen.count(link) for link in dict.fromkeys(chosen) if not link.is_fallback] == each


def test_small_fetch_uses_the_fastest_link_alone():
    chosen = links(1_000, 2_500).spread(1, 4, striped=False)
    assert [(link.address.port, link.is_fallback) for link in chosen] == [(2, False), (1, True)]


@dataclass
class Waiting:
    """A stream before or in its first conversation."""

    link: Any
    is_conversing: bool = False
    queue: deque = field(default_factory=deque)
    channel: Any = None
    was_stolen_from: bool = False
    is_closed: bool = False


def first_bytes(used, streams):
    """Return the bytes that the first stream takes while the others still connect."""
    peer = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE)
    spec = FetchSpec(peer, b"", Urgency.FETCH, lambda _: memoryview(b""), lambda *_: None)
    ref = BlockRef(BlockHash(b"h" * 32), payload_checksum([]), 256, BLOCK_BYTES)
    fetch = Fetch(spec, used, FetchWork([PendingBlock(ref)]), Connections())
    streams[0].is_conversing = True
    fetch._streams = streams
    return sum(piece.left_bytes for piece in fetch.next_pieces(streams[0]))


def test_first_stream_leaves_other_links_their_share_of_a_block():
    used = links(1_000, 1_000)
    streams = [Waiting(link) for link in used.spread(2, 4, striped=True)]
    assert first_bytes(used, streams) < BLOCK_BYTES / 2


def test_first_stream_leaves_no_share_to_a_failed_link():
    used = links(1_000, 1_000)
    streams = [Waiting(link) for link in used.spread(2, 4, striped=True)]
    used.failed(streams[1].link, OSError("no route"), 0.0)
    assert first_bytes(used, streams) > BLOCK_BYTES / 2
