"""Requests and offers of heads: their bounds, and the sizes of the largest ones."""

from dataclasses import replace

import pytest

from fabric.control.calls import NO_ORIGIN, decode_call, decode_reply, encode_call, encode_reply
from fabric.control.head_calls import HeadOffer, LentHead, OfferHead
from fabric.errors import RejectedError
from fabric.ids import AgentId, BlockHash, Checksum, MigrationId, NodeName, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import ADDRESSES_MAX, BLOCK_TOKENS, EPOCH_MAX, HEAD_POLL_S_MAX, HEAD_TOKENS_MAX
from fabric.net.links import Address, LinkKind
from fabric.net.wire import TICKET_BYTES_MAX, PeerCall, PeerReply, encode_frame
from fabric.record.manifest import Placed

BLOCKS_MAX = HEAD_TOKENS_MAX // BLOCK_TOKENS
NAMES = tuple(BlockHash(at.to_bytes(32)) for at in range(BLOCKS_MAX))
CALL = OfferHead(MigrationId("head-1"), NodeName("b"), TenantId("t"), NAMES, 0, HEAD_POLL_S_MAX)


def block(at, group=CacheGroup.FULL):
    return BlockRef(BlockHash(at.to_bytes(32)), Checksum(b"c" * 16), BLOCK_TOKENS, 1 << 30, group)


LENT = LentHead(
    agent=AgentId("a" * 128),
    epoch=EPOCH_MAX,
    tokens=HEAD_TOKENS_MAX,
    blocks=tuple(block(at) for at in range(BLOCKS_MAX)),
    windows=tuple(Placed(block(at, CacheGroup.WINDOW), at * BLOCK_TOKENS) for at in range(512)),
    states=(Placed(block(0, CacheGroup.STATE), HEAD_TOKENS_MAX),),
    ticket=bytes(TICKET_BYTES_MAX),
    addresses=(Address("255.255.255.255", 65_535, LinkKind.THUNDERBOLT),) * ADDRESSES_MAX,
)


def test_largest_request_and_offer_fit_their_frames():
    raw = encode_call(CALL)
    assert encode_frame(PeerCall(raw))
    assert decode_call(raw) == (CALL, NO_ORIGIN)
    offer = HeadOffer(LENT, HEAD_TOKENS_MAX)
    raw = encode_reply(offer)
    assert encode_frame(PeerReply(raw))
    assert decode_reply(HeadOffer, raw) == offer


@pytest.mark.parametrize(
    "changes",
    [
        {"names": ()},
        {"names": (*NAMES, NAMES[0])},
        {"names": (b"short",)},
        {"had_tokens": -1},
        {"wait_s": HEAD_POLL_S_MAX + 1},
        {"wait_s": -1.0},
        {"wait_s": float("nan")},
    ],
)
def test_requests_out_of_range_are_rejected(changes):
    with pytest.raises(RejectedError):
        replace(CALL, **changes)


@pytest.mark.parametrize(
    "changes", [{"agent": "../a"}, {"epoch": 0}, {"tokens": 0}, {"addresses": ()}]
)
def test_offers_out_of_range_are_rejected(changes):
    with pytest.raises(RejectedError):
        replace(LENT, **changes)
