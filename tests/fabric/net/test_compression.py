"""zstd is used on links slower than it, and never writes more bytes than announced."""

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import CorruptDataError
from fabric.net.compression import compress_slice, decompress_slice, zstd_saves_time

GIGABIT, TEN_GIGABIT = 125e6, 1.25e9
CORE = 1e9  # measured: level 1 on packed 4-bit blocks


@pytest.mark.parametrize(
    ("link", "ratio", "speed", "pays"),
    [
        (GIGABIT, 0.93, CORE, True),
        (GIGABIT, 0.83, CORE, True),
        (GIGABIT, 0.97, CORE, False),  # a gain not worth a core
        (GIGABIT, 0.93, 100e6, False),  # a busy core is slower than the link
        (TEN_GIGABIT, 0.83, CORE, False),
        (TEN_GIGABIT, 0.10, CORE, False),
        (GIGABIT, 1.00, CORE, False),
        (0, 0.1, CORE, False),
        (GIGABIT, 0.1, 0, False),
    ],
)
def test_zstd_is_used_only_where_it_saves_time(link, ratio, speed, pays):
    assert zstd_saves_time(link, ratio, speed) is pays


@given(st.floats(1e5, 1e10), st.floats(0.01, 0.99), st.floats(1e6, 1e10))
def test_slower_links_never_favor_uncompressed_transfer(link, ratio, speed):
    if zstd_saves_time(link, ratio, speed):
        assert zstd_saves_time(link / 2, ratio, speed)


@given(st.binary(min_size=1, max_size=5_000))
def test_compressed_slice_round_trips(raw):
    view = memoryview(bytearray(len(raw)))
    decompress_slice(compress_slice(raw), view)

    assert bytes(view) == raw


def frame_of(raw, **options):
    return zstandard.ZstdCompressor(**options).compress(raw)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"junk",
        compress_slice(bytes(1 << 26)),  # 2 KB that hold 64 MiB
        compress_slice(bytes(999)),
        compress_slice(bytes(1_001)),
        frame_of(bytes(1_000), write_content_size=False),
        compress_slice(bytes(1_000))[:-1],
        b"\x50\x2a\x4d\x18\xe8\x03\x00\x00" + bytes(1_000),  # a skippable frame
        bytes.fromhex("28b52ffde00000000010000000") + bytes(4),  # 17 bytes that claim 64 GiB
    ],
)
def test_malformed_frame_is_corrupt(frame):
    with pytest.raises(CorruptDataError):
        decompress_slice(frame, memoryview(bytearray(1_000)))


def test_damaged_slice_never_writes_past_its_buffer():
    rng = random.Random(5)
    raw = bytes(rng.choices(b"abcdefg", k=4_000))
    frame = bytearray(compress_slice(raw))
    buffer = bytearray(4_100)
    for position in range(len(frame)):
        damaged = bytes(frame[:position]) + bytes([frame[position] ^ 0x55]) + frame[position + 1 :]
        try:
            decompress_slice(damaged, memoryview(buffer)[:4_000])
        except CorruptDataError:
            continue
    assert buffer[4_000:] == bytes(100)
