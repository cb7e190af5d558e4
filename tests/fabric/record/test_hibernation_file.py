"""The hibernation file of an agent: every frame is verified before it is used."""

import itertools
import random
from dataclasses import replace

import pytest

from fabric.codec import pack
from fabric.errors import RejectedError
from fabric.ids import AgentId, Fingerprint, TenantId
from fabric.limits import (
    EPOCH_MAX,
    HIBERNATION_BYTES_MAX,
    HIBERNATION_FRAME_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    TICKET_BLOCKS_MAX,
)
from fabric.record.hibernation_file import (
    HEAD_BYTES,
    LEAD_BYTES_MAX,
    MAGIC,
    TAG_BYTES,
    FrameKind,
    FrameReader,
    HibernationHeader,
    SignedWith,
    caller_signing_key,
    encode_file,
    fabric_signing_key,
    file_bytes,
    key_id,
    open_reader,
    peek_header,
)

KEY = caller_signing_key(b"k" * 32)
RECORD = b"r" * 100
BLOCKS = (b"a" * 70, b"b" * 30)
HEADER = HibernationHeader(
    signed_with=SignedWith.KEY,
    key_id=key_id(KEY),
    salt=b"salt",
    tenant=TenantId(""),
    agent=AgentId("alice"),
    fingerprint=Fingerprint(b"f" * 32),
    model="tiny",
    epoch=3,
    revision=4,
    tokens_count=2,
    blocks_count=len(BLOCKS),
    record_bytes=len(RECORD),
    payload_bytes=sum(map(len, BLOCKS)),
    created_s=1.5,
)


def encoded(header=HEADER, record=RECORD, blocks=BLOCKS) -> bytes:
    payloads = (memoryview(block) for block in blocks)
    return b"".join(encode_file(header, record, payloads, KEY))


def read(raw: bytes, *, key=KEY, step=1 << 20):
    """Feed a file in steps and return its frames."""
    reader = FrameReader(key)
    frames = [
        frame for at in range(0, len(raw), step) for frame in reader.feed(raw[at : at + step])
    ]
    reader.finish()
    return frames


def ends_of(raw: bytes):
    at = len(MAGIC)
    while at < len(raw):
        at += HEAD_BYTES + int.from_bytes(raw[at + 4 : at + 8], "little") + TAG_BYTES
        yield at


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("key", [KEY, None], ids=["signed", "keyless"])
def test_round_trip(step, key):
    raw = encoded()
    frames = read(raw, key=key, step=step)

    kinds = [frame.kind for frame in frames]
    assert kinds == [FrameKind.HEADER, FrameKind.RECORD, *[FrameKind.BLOCK] * 2, FrameKind.END]
    assert [frame.body for frame in frames[1:4]] == [RECORD, *BLOCKS]
    assert peek_header(raw) == HEADER
    assert file_bytes(HEADER, map(len, BLOCKS)) == len(raw)


def test_long_parts_take_several_frames():
    long = random.Random(1).randbytes(2 * HIBERNATION_FRAME_BYTES_MAX + 5)
    header = replace(HEADER, record_bytes=len(long), blocks_count=1, payload_bytes=len(long))
    raw = encoded(header, long, (long,))
    frames = read(raw)

    by_kind = {k: list(g) for k, g in itertools.groupby(frames, key=lambda frame: frame.kind)}
    assert b"".join(f.body for f in by_kind[FrameKind.RECORD]) == long
    assert [len(f.body) for f in by_kind[FrameKind.BLOCK]] == [
        HIBERNATION_FRAME_BYTES_MAX, HIBERNATION_FRAME_BYTES_MAX, 5,
    ]  # fmt: skip
    assert file_bytes(header, [len(long)]) == len(raw)


def test_every_flipped_bit_is_rejected():
    raw = encoded()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RejectedError):
            read(bytes(flipped))


def test_damage_before_last_signature_is_detected_without_key():
    raw = encoded()
    for at in range(len(raw) - TAG_BYTES):
        flipped = bytearray(raw)
        flipped[at] ^= 16
        with pytest.raises(RejectedError):
            read(bytes(flipped), key=None)


def test_every_truncation_is_rejected():
    raw = encoded()
    ends = list(ends_of(raw))
    assert ends[-1] == len(raw)
    for end in range(len(raw)):
        with pytest.raises(RejectedError) as caught:
            read(raw[:end])
        assert caught.value.code == "truncated_file"


def test_omitted_repeated_reordered_or_added_frames_are_rejected():
    raw = encoded()
    cuts = [0, len(MAGIC), *ends_of(raw)]
    parts = [raw[a:b] for a, b in itertools.pairwise(cuts)]
    lead, frames = parts[0], parts[1:]
    wrong = [frames[:i] + frames[i + 1 :] for i in range(len(frames))]
    wrong += [[*frames[: i + 1], *frames[i:]] for i in range(len(frames))]
    wrong += [
        [*frames[:i], frames[i + 1], frames[i], *frames[i + 2 :]] for i in range(len(frames) - 1)
    ]
    wrong.append([*frames, b"x"])
    for order in wrong:
        with pytest.raises(RejectedError):
            read(lead + b"".join(order))


def test_wrong_key_is_distinguished_from_damage():
    raw = encoded()
    for key in (caller_signing_key(b"K" * 32), fabric_signing_key(b"c" * 32, TenantId("default"))):
        with pytest.raises(RejectedError) as caught:
            open_reader(peek_header(raw), key)
        assert caught.value.code == "wrong_key"
        with pytest.raises(RejectedError):
            read(raw, key=key)
    one, two = (fabric_signing_key(b"c" * 32, TenantId(tenant)) for tenant in "ab")
    assert one != two


@pytest.mark.parametrize(
    ("lead", "code"),
    [
        (b"", None),
        (MAGIC[:3], None),
        (MAGIC + b"\1", None),
        (b"MFHIBER2", "unknown_version"),
        (b"PK\3\4", "not_a_hibernation_file"),
        (MAGIC + b"\2\0\0\0\1\0\0\0", "damaged_file"),  # begins with its record
        (MAGIC + b"\1\1\0\0\1\0\0\0", "damaged_file"),
        (MAGIC + b"\1\0\0\0\0\0\0\0", "damaged_file"),  # of no length
        (MAGIC + b"\1\0\0\0\xff\xff\xff\xff", "damaged_file"),  # of 4 GiB
        (MAGIC + b"\1\0\0\0\1\0\0\0\xc1", "damaged_file"),  # not msgpack
    ],
)
def test_lead_bytes_are_classified(lead, code):
    if code is None:
        assert peek_header(lead) is None
        return
    for parse in (peek_header, read):
        with pytest.raises(RejectedError) as caught:
            parse(lead)
        if parse is peek_header:
            assert caught.value.code == code


def test_oversized_frame_is_rejected_before_its_body_arrives():
    raw = encoded()
    end = next(ends_of(raw))
    reader = FrameReader(KEY)
    assert len(list(reader.feed(raw[:end]))) == 1
    huge = bytes([FrameKind.RECORD, 0, 0, 0]) + (HIBERNATION_FRAME_BYTES_MAX + 1).to_bytes(
        4, "little"
    )
    with pytest.raises(RejectedError):
        list(reader.feed(huge))


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": Fingerprint(b"f" * 31)},
        {"agent": AgentId("../etc")},
        {"model": "m" * 513},
        {"salt": b"s" * 65},
        {"tenant": TenantId("other")},
        {"epoch": 0},
        {"epoch": EPOCH_MAX},
        {"revision": -1},
        {"tokens_count": 0},
        {"blocks_count": TICKET_BLOCKS_MAX + 1},
        {"record_bytes": MANIFEST_BYTES_MAX + 1},
        {"payload_bytes": 0},
        {"payload_bytes": HIBERNATION_BYTES_MAX + 1},
        {"created_s": float("nan")},
        {"epoch": True},
    ],
    ids=str,
)
def test_headers_with_out_of_range_values_are_rejected(change):
    body = pack(replace(HEADER, **change))
    lead = MAGIC + bytes([FrameKind.HEADER, 0, 0, 0]) + len(body).to_bytes(4, "little") + body
    assert len(lead) < LEAD_BYTES_MAX
    with pytest.raises(RejectedError):
        peek_header(lead)
