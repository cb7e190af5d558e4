"""The MAC of one direction of one connection: AES-256-GMAC under a counter.

Nothing is encrypted: a cluster's cables are its own. But nobody on the way can change, repeat,
drop, reorder or splice what travels, because each MAC covers its bytes and its place.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12


class TamperedError(ConnectionAbortedError):
    """What arrived is not what the peer sent; the connection is of no more use."""


class FrameSeal:
    """Makes or checks the MACs of one direction, in the order of the bytes."""

    def __init__(self, key: bytes) -> None:
        """Start at the first MAC; `key` must serve no other direction or connection."""
        self._gcm = AESGCM(key)
        self._count = 0

    def mac(self, data: bytes | memoryview) -> bytes:
        """Return the MAC of the next `data`; other threads run meanwhile."""
        return self._gcm.encrypt(self._next(), b"", data)

    def check(self, data: bytes | memoryview, mac: bytes | memoryview) -> None:
        """Raise TamperedError unless `mac` is that of the next `data`."""
        try:
            self._gcm.decrypt(self._next(), mac, data)
        except InvalidTag:
            message = "bytes arrived that the peer did not send"
            raise TamperedError(message) from None

    def _next(self) -> bytes:
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce
