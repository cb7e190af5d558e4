"""Compression of transfers: whether zstd pays on a link, and decompression with a bound.

A stream compresses, sends and decompresses different slices at once, so the slowest of the
three decides. 4-bit blocks are nearly random: level 1 leaves 0.83-0.93 of them, at about
1 GB/s per core, so a gigabit link gains some 10 % and ten gigabit lose.
"""

import math
from typing import Final

import zstandard

from fabric.errors import CorruptDataError
from fabric.limits import MIB

ZSTD_LEVEL: Final = 1
GAIN_MIN: Final = 0.04  # less is not worth the cores that decoding could use
_WINDOW_BYTES_MIN: Final = 1024  # the format has no smaller one
DECOMPRESS_BYTES_PER_S: Final = 600 * MIB  # of output; an M1 core does more


def zstd_pays(
    link: float,
    ratio: float,
    compress: float,
    decompress: float = DECOMPRESS_BYTES_PER_S,
) -> bool:
    """Compare seconds per payload byte, raw against compressed.

    `link`, `compress` and `decompress` are bytes per second, the latter two of payload;
    `ratio` is compressed over original size. A link of 0 means: never.
    """
    if min(link, compress, decompress) <= 0:
        return False
    raw_s = 1 / link
    zstd_s = max(1 / compress, ratio / link, 1 / decompress)
    return zstd_s < raw_s * (1 - GAIN_MIN)


def zstd_may_pay(link: float) -> bool:
    """Return whether any ratio could pay on a link of so many bytes per second."""
    return zstd_pays(link, 0.0, math.inf)


def compress_slice(raw: bytes | memoryview) -> bytes:
    """Compress one slice as a frame that declares its size."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)


def decompress_slice(frame: bytes | bytearray | memoryview, into: memoryview) -> None:
    """Fill `into` exactly; raise CorruptDataError for a frame that holds anything else."""
    message = "compressed slice does not decode to its announced length"
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
