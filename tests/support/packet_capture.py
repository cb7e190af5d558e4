"""Packets on a network interface of this machine, as an eavesdropper sees them."""

import ctypes
import os
import socket
import struct
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Self

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 512 << 20
IPV4, IPV6, TCP = 0x0800, 0x86DD, 6
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")


def missing_requirement() -> str | None:
    """Return the reason why packets cannot be captured here, or None."""
    if not sys.platform.startswith("linux"):
        return "packets are captured on Linux only"
    return None if os.geteuid() == 0 else "only root sees packets"


class Capture:
    """Packets sent on one interface; TCP is reassembled per direction of a connection.

    With `namespace` the interface is that of a network namespace.
    """

    def __init__(self, device: str, namespace: str | None = None) -> None:
        self._socket = _opened(namespace)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((device, 0))
        self._socket.settimeout(0.2)
        self._streams: dict[tuple, list[tuple[int, bytes]]] = defaultdict(list)
        self._others: list[bytes] = []
        self._ended = threading.Event()
        self.packets = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        raw = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self.lost = struct.unpack("II", raw)[1]
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                raw, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._ended.is_set():
                    return
                continue
            if address[2] == socket.PACKET_OUTGOING:  # on lo, each packet is also seen as incoming
                self.packets += 1
                self._take(address[1], raw[14:])

    def _take(self, kind: int, packet: bytes) -> None:
        if kind == IPV4 and packet[9] == TCP:
            head, ends = (packet[0] & 15) * 4, packet[12:20]
            packet = packet[: int.from_bytes(packet[2:4], "big") or len(packet)]
        elif kind == IPV6 and packet[6] == TCP:
            head, ends = 40, packet[8:40]
        else:
            self._others.append(packet)
            return
        segment = packet[head:]
        payload = segment[(segment[12] >> 4) * 4 :]
        if payload:
            number = int.from_bytes(segment[4:8], "big")
            self._streams[ends, segment[:4]].append((number, payload))

    def streams(self) -> list[bytes]:
        """Return each direction of each connection as its reader received it, and other packets."""
        return [*map(_joined, self._streams.values()), *self._others]

    def find(self, needle: bytes) -> list[bytes]:
        """Return the surroundings of `needle` in each stream that contains it."""
        found = []
        for stream in self.streams():
            at = stream.find(needle)
            if at >= 0:
                found.append(stream[max(0, at - 80) : at + len(needle) + 20])
        return found


def _opened(namespace: str | None) -> socket.socket:
    """Open a socket in a namespace, from a thread that enters the namespace and then ends."""
    sockets = []

    def work() -> None:
        if namespace is not None:
            with (NAMESPACES / namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                    return
        kind = socket.htons(ETH_P_ALL)
        sockets.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, kind))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sockets, f"{namespace} cannot be entered"
    return sockets[0]


def _joined(segments: list[tuple[int, bytes]]) -> bytes:
    """Put segments in order; drop retransmissions and skip gaps."""
    first = segments[0][0]
    out, end = bytearray(), 0
    for number, payload in sorted(((n - first + (1 << 31)) % (1 << 32), p) for n, p in segments):
        fresh = payload[max(0, end - number) :] if number < end else payload
        out += fresh
        end = max(end, number + len(payload))
    return bytes(out)
