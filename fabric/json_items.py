"""Upper bound of the number of values in a JSON text, counted before it is parsed.

An object in memory takes up to a hundred times the bytes of `[],` in a body. Only brackets and
commas outside of strings count, so a long string full of them is a single value.
"""

from fabric.errors import TooLargeError

_SLICE_CHARS = 1 << 16


class ItemCount:
    """Counter of the values in a JSON text that arrives in parts; raises over its limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items = 0
        self._strings = 0
        self._is_in_string = False
        self._held = b""  # a backslash whose character has not arrived yet

    def feed(self, part: bytes | bytearray) -> None:
        """Count one more part; raise TooLargeError when there are too many.

        Invalid JSON may be miscounted from its first error on, where parsing fails anyway.
        """
        data = self._held + part
        backslashes = len(data) - len(data.rstrip(b"\\"))
        self._held = b"\\" if backslashes % 2 else b""
        if self._held:
            data = data[:-1]
        pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[1 if self._is_in_string else 0 :: 2])
        self._is_in_string ^= len(pieces) % 2 == 0
        self._strings += len(pieces) // 2
        self._items += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        # Half of the strings may be keys: with more, the text is not JSON.
        if self._items > self._limit or self._strings > 2 * self._limit + 2:
            message = f"the body holds more than {self._limit} values"
            raise TooLargeError(message, code="too_many_values")

    def feed_whole(self, text: str) -> None:
        """Count a complete text, independently of earlier ones."""
        self._is_in_string, self._held = False, b""
        for start in range(0, len(text), _SLICE_CHARS):
            self.feed(text[start : start + _SLICE_CHARS].encode("utf-8", "surrogatepass"))


def require_few_items(raw: bytes | str, limit: int) -> None:
    """Raise TooLargeError if a JSON text may hold more values than `limit`."""
    if len(raw) <= limit:  # a value has at least one character
        return
    count = ItemCount(limit)
    for start in range(0, len(raw), _SLICE_CHARS):
        part = raw[start : start + _SLICE_CHARS]
        count.feed(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
