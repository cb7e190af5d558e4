"""Frames decode to exactly the encoded messages."""

import struct
import tracemalloc
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fabric import PROTOCOL_VERSION
from fabric.errors import (
    ConflictError,
    CorruptDataError,
    FabricError,
    NotFoundError,
    OverloadedError,
    RejectedError,
    RetryLaterError,
    TooLargeError,
    UnauthorizedError,
)
from fabric.ids import Fingerprint, NodeName
from fabric.limits import BLOCK_BYTES_MAX, FRAME_BYTES_MAX, TRANSFER_SLICE_BYTES_MAX
from fabric.net.handshake import HandshakeRole, check_proof, prove
from fabric.net.wire import (
    _KINDS,
    FETCH_PARTS_MAX,
    HEAD_BYTES,
    TICKET_BYTES_MAX,
    UNKNOWN_REFUSAL,
    Challenge,
    FetchPart,
    FetchRequest,
    Goodbye,
    Hello,
    PayloadCodec,
    PayloadHead,
    Proof,
    Refusal,
    Urgency,
    decode_body,
    decode_head,
    encode_frame,
    refusal_error,
    refusal_of,
)

ALL = tuple(kind for kind, _ in _KINDS.values())
KEY = bytes(range(32))
HELLO = Hello(NodeName("mac-b"), NodeName("mac-a"), Fingerprint(b"f" * 32), b"n" * 32)
NONCE = b"s" * 32
PART = FetchPart(b"h" * 32, b"c" * 16, 0, 1)

names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
digests = st.binary(min_size=32, max_size=32)


def block_range(bytes_max):
    """Draw offset and length of a range of a block, at most `bytes_max` long."""
    return st.integers(0, BLOCK_BYTES_MAX - 1).flatmap(
        lambda offset: st.tuples(
            st.just(offset), st.integers(1, min(bytes_max, BLOCK_BYTES_MAX - offset))
        )
    )


checksums = st.binary(min_size=16, max_size=16)
parts = st.tuples(digests, checksums, block_range(BLOCK_BYTES_MAX)).map(
    lambda drawn: FetchPart(drawn[0], drawn[1], *drawn[2])
)
raw_heads = block_range(TRANSFER_SLICE_BYTES_MAX).map(
    lambda at: PayloadHead(7, at[0], at[1], at[1])
)
messages = st.one_of(
    st.builds(Hello, names, names, digests, digests),
    st.builds(Challenge, digests, digests),
    st.builds(Proof, digests),
    st.builds(
        FetchRequest,
        st.binary(min_size=1, max_size=TICKET_BYTES_MAX),
        st.lists(parts, min_size=1, max_size=FETCH_PARTS_MAX).map(tuple),
        st.integers(0, 1 << 40),
        st.sampled_from(Urgency),
    ),
    raw_heads,
    st.builds(
        Refusal,
        st.from_regex(r"[a-z0-9_]{1,40}", fullmatch=True),
        st.text(max_size=300).filter(str.isprintable),
    ),
    st.just(Goodbye()),
)


def decode(raw, expected=ALL):
    head = decode_head(raw[:HEAD_BYTES], expected)
    return decode_body(head, raw[HEAD_BYTES:])


@given(messages)
def test_messages_round_trip(message):
    assert decode(encode_frame(message)) == message


def test_largest_request_fits_its_frame_limit():
    part = FetchPart(b"h" * 32, b"c" * 16, BLOCK_BYTES_MAX // 2, BLOCK_BYTES_MAX // 2)
    parts = (part,) * FETCH_PARTS_MAX
    message = FetchRequest(b"t" * TICKET_BYTES_MAX, parts, 1 << 60, Urgency.MIGRATION_TAIL)

    assert decode(encode_frame(message)) == message


@given(st.binary(max_size=2_000))
@example(b"mf")
@example(b"mf\x01\x01\xff\xff\xff\xff")
def test_garbage_raises_rejected_error_only(raw):
    with pytest.raises(RejectedError):
        decode(raw)


@given(st.sampled_from(sorted(_KINDS)), st.binary(max_size=600))
def test_garbage_body_is_rejected_or_decodes_to_its_kind(number, body):
    raw = struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, number, len(body)) + body
    try:
        message = decode(raw)
    except RejectedError:
        return
    assert type(message) is _KINDS[number][0]


@given(messages, st.data())
def test_damaged_frame_is_rejected_or_a_valid_message(message, data):
    raw = bytearray(encode_frame(message))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(raw))
    except RejectedError:
        return
    assert decode(encode_frame(decoded)) == decoded


@pytest.mark.parametrize("number", sorted(_KINDS))
def test_deep_and_wide_bodies_allocate_little_memory(number):
    _, limit = _KINDS[number]
    bombs = [
        (b"\xdd" + (limit - 1).to_bytes(4, "big")) * (limit // 5),
        b"\x91" * limit,
        b"\xdf\xff\xff\xff\xff" + b"\xc0" * (limit - 5),
        b"\xc6\xff\xff\xff\xff" + b"\x00" * (limit - 5),
    ]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(RejectedError):
            decode(struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, number, len(bomb)) + bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 128 * limit + 200_000
    assert limit <= FRAME_BYTES_MAX


def test_oversized_frame_is_rejected_by_its_head():
    head = struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, 1, 513)

    with pytest.raises(TooLargeError, match="over the limit of 512"):
        decode_head(head, ALL)


def test_unexpected_frame_kind_is_rejected():
    with pytest.raises(RejectedError, match="unexpected frame"):
        decode(encode_frame(Goodbye()), (Hello, Proof))


def test_other_protocol_version_is_reported_by_number():
    raw = struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION + 1, 250, 0xFFFFFFFF)

    with pytest.raises(RejectedError, match=f"protocol {PROTOCOL_VERSION + 1}") as caught:
        decode_head(raw, ALL)

    assert caught.value.code == "protocol_version"


@pytest.mark.parametrize(
    "build",
    [
        lambda: replace(HELLO, name="Not A Node"),
        lambda: replace(HELLO, nonce=b"short"),
        lambda: replace(HELLO, fingerprint=b"short"),
        lambda: Challenge(b"n" * 31, b"p" * 32),
        lambda: Proof(b""),
        lambda: FetchPart(b"h" * 31, b"c" * 16, 0, 1),
        lambda: FetchPart(b"h" * 32, b"c" * 16, -1, 1),
        lambda: FetchPart(b"h" * 32, b"c" * 16, 0, 0),
        lambda: FetchPart(b"h" * 32, b"c" * 16, 0, BLOCK_BYTES_MAX + 1),
        lambda: FetchPart(b"h" * 32, b"c" * 16, 1, BLOCK_BYTES_MAX),
        lambda: FetchPart(b"h" * 32, b"c" * 16, BLOCK_BYTES_MAX, 1),
        lambda: FetchRequest(b"t", ()),
        lambda: FetchRequest(b"", (PART,)),
        lambda: FetchRequest(
            b"t", (FetchPart(b"h" * 32, b"c" * 16, 0, 1),) * (FETCH_PARTS_MAX + 1)
        ),
        lambda: FetchRequest(b"t", (PART,), -1),
        lambda: PayloadHead(-1, 0, 1, 1),
        lambda: PayloadHead(0, -1, 1, 1),
        lambda: PayloadHead(0, 0, 0, 0),
        lambda: PayloadHead(0, BLOCK_BYTES_MAX - 1, 2, 2),
        lambda: PayloadHead(0, 0, TRANSFER_SLICE_BYTES_MAX + 1, TRANSFER_SLICE_BYTES_MAX + 1),
        lambda: PayloadHead(0, 0, 10, 11),
        lambda: PayloadHead(0, 0, 10, 10, PayloadCodec.ZSTD),
        lambda: PayloadHead(0, 0, 10, 0, PayloadCodec.ZSTD),
        lambda: PayloadHead(0, 0, TRANSFER_SLICE_BYTES_MAX + 1, 10, PayloadCodec.ZSTD),
        lambda: Refusal("Bad Code", "m"),
        lambda: Refusal("code", "two\nlines"),
        lambda: Refusal("code", "m" * 301),
    ],
)
def test_messages_with_out_of_range_values_are_rejected(build):
    with pytest.raises(RejectedError):
        build()


# --- proofs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", HandshakeRole)
def test_proof_verifies_with_the_same_key(role):
    check_proof(KEY, role, HELLO, NONCE, prove(KEY, role, HELLO, NONCE))


def test_proof_is_bound_to_key_role_nonces_names_and_model():
    proof = prove(KEY, HandshakeRole.CLIENT, HELLO, NONCE)
    others = {
        "name": NodeName("mac-c"),
        "source": NodeName("mac-c"),
        "fingerprint": Fingerprint(b"g" * 32),
        "nonce": b"m" * 32,
        "encrypts": True,
    }
    assert set(others) == {field.name for field in fields(HELLO)}

    changed = [
        (b"k" * 32, HandshakeRole.CLIENT, HELLO, NONCE),
        (KEY, HandshakeRole.SERVER, HELLO, NONCE),
        (KEY, HandshakeRole.CLIENT, HELLO, b"t" * 32),
        *((KEY, HandshakeRole.CLIENT, replace(HELLO, **{k: v}), NONCE) for k, v in others.items()),
    ]
    for arguments in changed:
        with pytest.raises(UnauthorizedError):
            check_proof(*arguments, proof)


def test_proof_separates_adjacent_names():
    one = replace(HELLO, name=NodeName("ab"), source=NodeName("c"))
    other = replace(HELLO, name=NodeName("a"), source=NodeName("bc"))

    assert prove(KEY, HandshakeRole.CLIENT, one, NONCE) != prove(
        KEY, HandshakeRole.CLIENT, other, NONCE
    )


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        UnauthorizedError("m", code="bad_ticket"),
        UnauthorizedError("m", code="ticket_expired"),
        UnauthorizedError("m", code="not_offered"),
        UnauthorizedError("m", code="bad_key"),
        ConflictError("m", code="fingerprint_mismatch"),
        NotFoundError("m"),
        CorruptDataError("m"),
        OverloadedError("m"),
        RetryLaterError("m"),
        RejectedError("m", code="bad_range"),
    ],
)
def test_error_class_and_code_survive_the_wire(error):
    refusal = decode(encode_frame(refusal_of(error)))
    crossed = refusal_error(refusal)

    assert (type(crossed), crossed.code) == (type(error), error.code)


def test_unknown_refusal_codes_map_to_one_code():
    crossed = {refusal_error(Refusal(f"made_up_{i}", "m")).code for i in range(9)}

    assert crossed == {UNKNOWN_REFUSAL}


def test_long_or_unprintable_error_message_is_shortened():
    refusal = refusal_of(FabricError("line\nline\x00" + "m" * 1_000))

    assert refusal.message.startswith("line line m")
    assert decode(encode_frame(refusal)) == refusal
