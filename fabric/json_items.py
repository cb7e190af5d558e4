"""How many values a JSON text holds at most, counted before anything of it is built.

Objects in memory are up to a hundred times as large as `[],` in a body, and are all made and
freed in one go. The count looks at brackets and commas outside of strings only, so a long text
full of them is a single value.
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

        What is no JSON may be counted wrongly from its first error on, where parsing ends, too.
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
        # Every second string may be a key; more of them than values are no JSON.
        if self._items > self._limit or self._strings > 2 * self._limit + 2:
            message = f"the body holds more than {self._limit} values"
            raise TooLargeError(message, code="too_many_values")

    def feed_whole(self, text: str) -> None:
        """Count another text, which starts afresh even after an invalid one."""
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
