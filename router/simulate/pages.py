"""Pages of a chart: pixels as PNG, or shapes as SVG."""

import struct
import zlib
from html import escape
from typing import Any, Final, Protocol

import numpy as np

Colour = tuple[int, int, int]

# Rows of three pixels per glyph, from the top, as octal digits.
_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.-:/%()+=, "
_ROWS: Final = (
    "7555726227717477171755711747177475771122757577571725755656563444365556746477464434553"
    "5575572227111525565544447577557555525552656442556365655342167222255557555525577555255"
    "55222712470000200700020201124451245122214222402720070700002400000"
)
_GLYPHS: Final = {letter: _ROWS[5 * index : 5 * index + 5] for index, letter in enumerate(_LETTERS)}
GLYPH_WIDTH, GLYPH_HEIGHT = 4, 5  # with the space after it


class Page(Protocol):
    """Surface with its origin at the top left."""

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Fill a rectangle."""
        ...

    def text(self, x: float, y: float, text: str, size: int = 2) -> None:
        """Write a line whose top left corner is at (x, y)."""
        ...


class PixelPage:
    """Page of pixels, with a small font of its own."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels: Any = np.full((height, width, 3), 255, dtype=np.uint8)

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        left, top = max(0, round(x)), max(0, round(y))
        right, bottom = max(left, round(x + width)), max(top, round(y + height))
        self._pixels[top:bottom, left:right] = colour

    def text(self, x: float, y: float, text: str, size: int = 2) -> None:
        for index, letter in enumerate(text.upper()):
            rows = _GLYPHS.get(letter, _GLYPHS["-"])
            for row, digit in enumerate(rows):
                for column in range(3):
                    if int(digit, 8) & (4 >> column):
                        left = x + (index * GLYPH_WIDTH + column) * size
                        self.box(left, y + row * size, size, size, (40, 40, 40))

    def png(self) -> bytes:
        """Return the page as a PNG file; equal pages give equal bytes."""
        height, width, _ = self._pixels.shape
        rows = b"".join(b"\x00" + row.tobytes() for row in self._pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, data) for kind, data in parts)


def _part(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


class VectorPage:
    """Page of shapes, for a browser."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        fill = "#{:02x}{:02x}{:02x}".format(*colour)
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"/>'
        )

    def text(self, x: float, y: float, text: str, size: int = 2) -> None:
        baseline = y + GLYPH_HEIGHT * size
        self._shapes.append(
            f'<text x="{x:.1f}" y="{baseline:.1f}" font-size="{size * 6}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the page as an SVG element."""
        width, height = self._size
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="system-ui, sans-serif" fill="#282828">\n{shapes}\n</svg>'
        )
