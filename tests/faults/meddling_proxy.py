"""A man in the middle of the data plane, with the wire format but without the cluster's key."""

import socket
import threading
from contextlib import suppress

from fabric.net.wire import (
    _KINDS,
    HEAD_BYTES,
    MAC_BYTES,
    Challenge,
    Hello,
    PayloadHead,
    Proof,
    Refusal,
    decode_body,
    decode_head,
)

_ALL = tuple(kind for kind, _ in _KINDS.values())
_UNSEALED = (Hello, Challenge, Proof)


class Unit:
    """Unit covered by one or two MACs in transit: a frame, and the slice that a head announces."""

    def __init__(self, message, frame, payload=b""):
        self.message = message
        self.frame = frame
        self.payload = payload

    @property
    def raw(self):
        return self.frame + self.payload


class MeddlingProxy:
    """Proxy that passes units of connection n through `meddlers[n](unit)`, if there is one.

    `side` names the sender whose units are changed. A meddler that returns None hangs up.
    """

    def __init__(self, target, meddlers=(), side="server"):
        self._target = target
        self._meddlers = list(meddlers)
        self._side = side
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._sockets = []
        self._threads = []
        self._run(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for sock in [self._listener, *self._sockets]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _run(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                meddler = self._meddlers.pop(0) if self._meddlers else None
                self.connections += 1
                for source, sink, side in ((client, server, "client"), (server, client, "server")):
                    self._run(self._pump, source, sink, meddler if side == self._side else None)

    def _pump(self, source, sink, meddler):
        with suppress(OSError, EOFError):
            while True:
                unit = _read(source)
                passed = unit.raw if meddler is None else meddler(unit)
                if passed is None:
                    break
                sink.sendall(passed)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _read(sock):
    head = _exactly(sock, HEAD_BYTES)
    announced = decode_head(head, _ALL)
    body = _exactly(sock, announced.body_bytes)
    message = decode_body(announced, body)
    if isinstance(message, _UNSEALED):
        return Unit(message, head + body)
    if isinstance(message, Refusal):  # sealed or not; no message follows
        return Unit(message, head + body + sock.recv(MAC_BYTES))
    frame = head + body + _exactly(sock, MAC_BYTES)
    if not isinstance(message, PayloadHead):
        return Unit(message, frame)
    return Unit(message, frame, _exactly(sock, message.wire_bytes + MAC_BYTES))


def _exactly(sock, count):
    out = bytearray()
    while len(out) < count:
        chunk = sock.recv(count - len(out))
        if not chunk:
            raise EOFError
        out += chunk
    return bytes(out)
