"""Blocks in files, a transfer server over them, and a fetch into plain buffers."""

import os
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress

from fabric.control.agent_at import OfferRequest
from fabric.errors import NotFoundError, RejectedError
from fabric.ids import AgentId, BlockHash, Fingerprint, MigrationId, NodeName, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.hashing import payload_checksum
from fabric.net.links import Address, LinkKind
from fabric.net.wire import FetchPart
from node.net.channel import Channel
from node.net.peer import FetchTimeouts
from node.store.descriptors import OpenPayload
from node.transfer.client import fetch_blocks
from node.transfer.server import TransferServer

KEY = bytes(range(32))
FINGERPRINT = Fingerprint(b"f" * 32)
SOURCE, TARGET = NodeName("mac-a"), NodeName("mac-b")
TENANT, AGENT = TenantId("default"), AgentId("agent-1")
MIGRATION = MigrationId("migration-1")
# Retries are quick, but no timeout expires on a busy machine; BRIEF is for peers that never answer.
HASTE = FetchTimeouts(pause_s=0.02, rounds=3)
BRIEF = FetchTimeouts(handshake_s=0.5, slice_s=0.5, pause_s=0.02, rounds=3)


class Shelf:
    """A BlockSource over a folder; payloads start at an odd offset of their files."""

    LEAD = 16_411

    def __init__(self, folder):
        self.folder = folder
        self.opened = 0

    def add(self, size, seed=0, *, noise=True):
        rng = random.Random(f"{size} {seed}")
        payload = rng.randbytes(size)
        if not noise:  # half of each byte is zero: zstd halves the payload
            payload = payload.translate(bytes(i % 16 for i in range(256)))
        name = rng.randbytes(32)
        ref = BlockRef(BlockHash(name), payload_checksum([payload]), 256, size)
        self.path(ref).write_bytes(b"h" * self.LEAD + payload)
        return ref

    def path(self, ref):
        return self.folder / f"{ref.name}.blk"

    def payload(self, ref):
        return self.path(ref).read_bytes()[self.LEAD :]

    def open_payload(self, ref):
        self.opened += 1
        try:
            descriptor = os.open(self.path(ref), os.O_RDONLY)
            return OpenPayload(descriptor, self.LEAD, ref.payload_bytes)
        except FileNotFoundError:
            message = "no such block"
            raise NotFoundError(message) from None


class Catch:
    """Buffers for a fetch, and a record of its requests and results."""

    def __init__(self):
        self.lock = threading.Lock()
        self.allocated = []
        self.blocks = {}
        self.open_max = 0  # largest number of buffers allocated and not yet done

    def allocate(self, ref):
        with self.lock:
            self.allocated.append(ref.name)
            self.open_max = max(self.open_max, len(self.allocated) - len(self.blocks))
        return memoryview(bytearray(ref.payload_bytes))

    def done(self, ref, view):
        with self.lock:
            assert ref.name not in self.blocks, "the block was done before"
            self.blocks[ref.name] = bytes(view)


def loopback(port, kind=LinkKind.LOOPBACK, speed_mbit=0):
    return Address("127.0.0.1", port, kind, speed_mbit)


def slow_link(port):
    """Return a link so slow that compression pays even on a busy machine."""
    return loopback(port, LinkKind.WIFI, speed_mbit=10)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


_servers: list[TransferServer] = []


def serve(shelf, clock, **changes):
    options = {"name": SOURCE, "cluster_key": KEY, "fingerprint": FINGERPRINT, **changes}
    _servers.append(TransferServer(blocks=shelf, clock=clock, **options))
    return _servers[-1]


def stop_servers():
    """Stop a test's servers even if it failed: a later test would be blamed for the leak."""
    while _servers:
        _servers.pop().stop()


def await_count(server, what, at_least=1):
    """Wait until a server's counter reaches a value: its thread may lag behind its replies."""
    deadline_s = time.monotonic() + 60
    while server.counts().get(what, 0) < at_least:
        assert time.monotonic() < deadline_s, (what, server.counts())
        time.sleep(0.01)


def offer(server, refs, migration=MIGRATION, target=TARGET, valid_s=60.0):
    return server.offers.add(OfferRequest(TENANT, AGENT, 3, migration, target), refs, valid_s)


def fetch(addresses, ticket, refs, catch=None, **changes):
    """Fetch blocks; return the report and the received blocks."""
    catch = catch or Catch()
    options = {
        "name": TARGET,
        "source": SOURCE,
        "cluster_key": KEY,
        "fingerprint": FINGERPRINT,
        "allocate": catch.allocate,
        "done": catch.done,
        "timeouts": HASTE,
        **changes,
    }
    report = fetch_blocks(addresses, ticket=ticket, refs=refs, **options)
    return report, catch


def part(ref, offset=0, length=None):
    length = ref.payload_bytes - offset if length is None else length
    return FetchPart(ref.block_hash, ref.checksum, offset, length)


@contextmanager
def dialled(port):
    """Open a bare connection to a server; yield it as frames and as a socket."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    channel = Channel(sock, time.monotonic, 5.0)
    sock.settimeout(60)
    try:
        yield channel, sock
    finally:
        channel.close()


def answer_of(sock):
    """Read until the peer closes."""
    out = bytearray()
    with suppress(ConnectionError):
        while chunk := sock.recv(65536):
            out += chunk
    return bytes(out)


@contextmanager
def impostor(act):
    """Run a server that calls `act(channel, socket)` for every connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets = []

    def serve_all():
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                open_sockets.append(sock)
                with suppress(OSError, RejectedError):
                    act(Channel(sock, time.monotonic, 5.0), sock)

    thread = threading.Thread(target=serve_all)
    thread.start()
    try:
        yield loopback(listener.getsockname()[1])
    finally:
        # The client has hung up, so `act` ends by itself; closing its socket would hide
        # unread data.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        for sock in open_sockets:
            sock.close()
        thread.join()
        listener.close()
