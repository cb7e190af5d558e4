"""Decrypted blocks that a server keeps for a moment: their ranges are asked for one by one."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from fabric.block import BlockRef
from fabric.limits import TRANSFER_HELD_BYTES
from node.payload import HeldPayload


class HeldPayloads:
    """The blocks last asked for, up to TRANSFER_HELD_BYTES and at least one."""

    def __init__(self, read: Callable[[BlockRef], memoryview]) -> None:
        """Take blocks from `read`, which checks them; what it raises comes through."""
        self._read = read
        self._lock = Lock()
        self._held: OrderedDict[str, HeldPayload] = OrderedDict()

    def get(self, ref: BlockRef) -> HeldPayload:
        """Return a block's bytes, read once for neighbouring requests."""
        with self._lock:
            found = self._held.get(ref.name)
            if found is not None:
                self._held.move_to_end(ref.name)
                return found
        payload = HeldPayload(self._read(ref))
        with self._lock:
            self._held[ref.name] = payload
            while len(self._held) > 1 and self._held_bytes() > TRANSFER_HELD_BYTES:
                self._held.popitem(last=False)
        return payload

    def clear(self) -> None:
        """Keep nothing, once nobody asks."""
        with self._lock:
            self._held.clear()

    def _held_bytes(self) -> int:
        return sum(payload.length for payload in self._held.values())
