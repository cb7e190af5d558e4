"""Compression of transfers: whether zstd saves time on a link, and bounded decompression.

A stream compresses, sends and decompresses different slices at the same time, so the slowest of
the three decides. 4-bit blocks are nearly random: level 1 compresses them to 0.83-0.93 of their
size, at about 1 GB/s per core. A 1 Gbit/s link gains some 10 %; a 10 Gbit/s link loses.
"""

import math
from typing import Final

import zstandard

from fabric.errors import CorruptDataError
from fabric.limits import MIB

ZSTD_LEVEL: Final = 1
GAIN_MIN: Final = 0.04  # a smaller gain is not worth the cores, which decoding could use
_WINDOW_BYTES_MIN: Final = 1024  # the smallest window of the zstd format
DECOMPRESS_BYTES_PER_S: Final = 600 * MIB  # of output; an M1 core is faster


def zstd_saves_time(
    link_bytes_per_s: float,
    ratio: float,
    compress_bytes_per_s: float,
    decompress_bytes_per_s: float = DECOMPRESS_BYTES_PER_S,
) -> bool:
    """Return whether compressed transfers take less time per payload byte than raw ones.

    `ratio` is compressed size over original size; speeds of zstd count original bytes. False if
    any speed is 0.
    """
    if min(link_bytes_per_s, compress_bytes_per_s, decompress_bytes_per_s) <= 0:
        return False
    raw_s = 1 / link_bytes_per_s
    zstd_s = max(1 / compress_bytes_per_s, ratio / link_bytes_per_s, 1 / decompress_bytes_per_s)
    return zstd_s < raw_s * (1 - GAIN_MIN)


def zstd_may_save_time(link_bytes_per_s: float) -> bool:
    """Return whether zstd saves time on this link at the best possible ratio and speed."""
    return zstd_saves_time(link_bytes_per_s, 0.0, math.inf)


def compress_slice(raw: bytes | memoryview) -> bytes:
    """Compress one slice to a zstd frame that declares its original size."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)


def decompress_slice(frame: bytes | bytearray | memoryview, into: memoryview) -> None:
    """Decompress `frame` into `into`; raise CorruptDataError unless it fills it exactly."""
    message = "the compressed slice does not decompress to its declared length"
    try:
        # `max_output_size` is ignored when the frame declares a size, so check that first.
        if zstandard.get_frame_parameters(frame).content_size != len(into):
            raise CorruptDataError(message)
        window = max(len(into), _WINDOW_BYTES_MIN)
        reader = zstandard.ZstdDecompressor(max_window_size=window).stream_reader(frame)
        filled = 0
        while filled < len(into):
            count = reader.readinto(into[filled:])
            if not count:
                raise CorruptDataError(message)
            filled += count
        if reader.read(1):
            raise CorruptDataError(message)
    except zstandard.ZstdError:
        raise CorruptDataError(message) from None
