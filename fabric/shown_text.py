"""Text of unknown origin, made safe to show on a terminal.

A terminal obeys control characters: they can recolor what follows, rename the window, overwrite
lines that were printed before, or reorder what a person reads. They are shown as escapes instead.
"""

import re
from typing import Final

# C0, DEL and C1; invisible and bidirectional marks; line and paragraph separators; lone surrogates;
# language tags. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
_CONTROLS: Final = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINE: Final = re.compile(rf"[{_CONTROLS}]")
_IN_BLOCK: Final = re.compile(rf"(?![\n\t])[{_CONTROLS}]")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]{0,32}m")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape_line(text: str) -> str:
    """Escape everything that a terminal would obey, line ends among it."""
    return _IN_LINE.sub(_escape, text)


def escape_block(text: str) -> str:
    """Drop colors, as logs have, and escape everything else that a terminal would obey.

    Line ends and tabs stay.
    """
    return _IN_BLOCK.sub(_escape, _COLOURS.sub("", text))


def escape_json(document: str) -> str:
    r"""Write control characters within a JSON document as `\uXXXX`; its meaning stays the same."""
    return _IN_BLOCK.sub(_json_escape, document)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
