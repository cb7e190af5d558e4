"""Protection of one direction of a connection: AES-256-GCM, or its MAC alone, under a counter.

Bytes cannot be changed, repeated, dropped, reordered or spliced on the way, because each MAC covers
them and their position. If the ends agreed on encryption they cannot be read either, except for
the heads of frames, which hold kinds and lengths.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fabric.net.wire import HEAD_BYTES, MAC_BYTES

_NONCE_BYTES = 12


class TamperedError(ConnectionAbortedError):
    """A frame that is not what the peer sent; the connection is unusable from then on."""


class FrameSeal:
    """Sealer or opener of one direction, in the order of the bytes."""

    def __init__(self, key: bytes, *, encrypts: bool) -> None:
        """Start at the first MAC; `key` must serve no other direction or connection."""
        self._gcm = AESGCM(key)
        self._count = 0
        self.encrypts = encrypts

    def frame(self, frame: bytes) -> bytes:
        if not self.encrypts:
            return frame + self._gcm.encrypt(self._next(), b"", frame)
        head = frame[:HEAD_BYTES]
        return head + self._gcm.encrypt(self._next(), frame[HEAD_BYTES:], head)

    def opened_frame(self, head: bytes, rest: bytes) -> bytes:
        """Return the body of a frame; raise TamperedError unless it is the peer's next."""
        try:
            if self.encrypts:
                return self._gcm.decrypt(self._next(), rest, head)
            body = rest[:-MAC_BYTES]
            self._gcm.decrypt(self._next(), rest[-MAC_BYTES:], head + body)
        except InvalidTag:
            raise _tampered_error() from None
        return body

    def slice(self, data: memoryview, out: memoryview) -> None:
        """Put the next payload slice into `out`, followed by its MAC.

        `out` may be the buffer of `data`, if nothing is encrypted. Other threads run meanwhile.
        """
        if self.encrypts:
            self._gcm.encrypt_into(self._next(), data, None, out)
        else:
            out[len(data) :] = self._gcm.encrypt(self._next(), b"", data)

    def check_slice(self, data: memoryview, mac: memoryview) -> None:
        """Raise TamperedError unless `mac` is that of the next slice, which is not encrypted."""
        try:
            self._gcm.decrypt(self._next(), mac, data)
        except InvalidTag:
            raise _tampered_error() from None

    def open_slice(self, sealed: memoryview, out: memoryview) -> None:
        """Decrypt the next slice into `out`; raise TamperedError unless it is the peer's."""
        try:
            self._gcm.decrypt_into(self._next(), sealed, None, out)
        except InvalidTag:
            raise _tampered_error() from None

    def _next(self) -> bytes:
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce


def _tampered_error() -> TamperedError:
    return TamperedError("bytes arrived that the peer did not send")
