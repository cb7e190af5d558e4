"""A TCP proxy that breaks connections on purpose, like `tc netem` without root."""

import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

_CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # linger 0: close sends a reset


@dataclass(frozen=True)
class Fault:
    """Faults of one connection, by position in the bytes sent from server to client."""

    cut_at: int | None = None  # both sides see a reset from here on
    stall_at: int | None = None  # nothing is forwarded from here on, and the connection stays open
    flip_at: int | None = None  # this byte is inverted
    pause_s: float = 0.0  # before each chunk
    chunk_bytes: int = _CHUNK_BYTES


class FaultProxy:
    """Proxy to `target` that applies `faults[n]` to connection n, and none to later ones."""

    def __init__(self, target, faults=()):
        self._target = target
        self._faults = deque(faults)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.from_client = []  # bytes sent by each client
        self.from_server = []  # bytes received by each client
        self._sockets = []
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._closed.set()
        for sock in [self._listener, *self._sockets]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self):
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self.connections += 1
            fault = self._faults.popleft() if self._faults else Fault()
            self._sockets += [client, server]
            self.from_client.append(bytearray())
            self.from_server.append(bytearray())
            self._pump(client, server, Fault(), self.from_client[-1])
            self._pump(server, client, fault, self.from_server[-1])

    def _pump(self, source, sink, fault, record):
        arguments = (source, sink, fault, record)
        thread = threading.Thread(target=self._forward, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _forward(self, source, sink, fault, record):
        limits = [at for at in (fault.cut_at, fault.stall_at) if at is not None]
        passed, limit = 0, min(limits, default=None)
        with suppress(OSError):
            while limit is None or passed < limit:
                room = fault.chunk_bytes if limit is None else limit - passed
                chunk = bytearray(source.recv(min(fault.chunk_bytes, room)))
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if fault.flip_at is not None and passed <= fault.flip_at < passed + len(chunk):
                    chunk[fault.flip_at - passed] ^= 0xFF
                time.sleep(fault.pause_s)
                record += chunk[: 1 << 20]  # before sending: the receiver may check at once
                sink.sendall(chunk)
                passed += len(chunk)
        if fault.cut_at is not None and passed >= fault.cut_at:
            self._reset(source, sink)

    def _reset(self, *sockets):
        time.sleep(0.05)  # so that the receiver can read the forwarded bytes
        for sock in sockets:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RD)
            sock.close()
