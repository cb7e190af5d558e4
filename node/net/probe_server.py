"""The answering end of link measurements: pings, and probes that never delay a transfer."""

from collections.abc import Callable
from threading import Lock
from typing import Final

from fabric.errors import OverloadedError
from fabric.net.wire import PROBE_CHUNK_BYTES, Ping, Pong, Probe, ProbeChunk
from node.net.channel import Channel

_FILL: Final = bytes(range(256)) * (PROBE_CHUNK_BYTES // 256)


class LinkAnswers:
    """Answers of a server to link probes; shared by its connections."""

    def __init__(self, is_sending: Callable[[], bool]) -> None:
        """`is_sending`: payload is being sent to a peer, so probes are refused."""
        self._is_sending = is_sending
        self._probing = Lock()

    def answer(self, channel: Channel, request: Ping | Probe) -> None:
        """Answer one request; raise OverloadedError where a probe would delay a transfer."""
        if isinstance(request, Ping):
            channel.send(Pong(request.number))
            return
        message = "the link is in use"
        if not self._probing.acquire(blocking=False):
            raise OverloadedError(message)
        try:
            for sent in range(0, request.size_bytes, PROBE_CHUNK_BYTES):
                if self._is_sending():
                    raise OverloadedError(message)
                channel.send(ProbeChunk(_FILL[: request.size_bytes - sent]))
        finally:
            self._probing.release()
