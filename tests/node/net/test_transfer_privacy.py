"""An eavesdropper reads nothing, and a tampered connection neither opens nor delivers bytes."""

import random
from dataclasses import replace

import pytest

from fabric.errors import FabricError, RejectedError
from fabric.hosting.clock import SystemClock
from fabric.net.handshake import HandshakeRole, prove
from fabric.net.wire import Challenge, Hello, encode_frame
from fabric.settings import ALWAYS, AUTO, ENCRYPTION_MODES, NEVER
from node.net.channel import Channel
from node.net.connections import Connections
from node.net.peer import Peer
from tests.faults.fault_proxy import Fault, FaultProxy
from tests.faults.meddling_proxy import MeddlingProxy
from tests.support.transfers import (
    FINGERPRINT,
    HASTE,
    KEY,
    SOURCE,
    TARGET,
    answer_of,
    fetch,
    impostor,
    loopback,
    offer,
    serve,
    slow_link,
)

SIZE = 300_000


@pytest.fixture
def serving(shelf):
    servers = []

    def start(mode):
        servers.append(serve(shelf, SystemClock(), encrypt_links=mode))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def cabled(monkeypatch):
    """Treat connections of this machine as a cable at the given ends."""

    def lay_cable(*, client, server):
        def is_on_cable(channel):
            is_server = channel._sock.getsockname()[1] == ports[0]
            return server if is_server else client

        ports = []
        monkeypatch.setattr(Channel, "is_on_cable", is_on_cable)
        return ports.append

    return lay_cable


def fetch_through_tap(shelf, server, mode, address=loopback):
    """Fetch a block through a tap; return the tapped bytes, and whether the block arrived."""
    ref = shelf.add(SIZE, noise=address is loopback)
    ticket = offer(server, [ref])
    kept = Connections()
    with FaultProxy(("127.0.0.1", server.addresses()[0].port)) as tap:
        link = address(tap.port)
        _, catch = fetch([link], ticket, [ref], connections=kept, encrypt_links=mode)
        kept.close()
    assert catch.blocks == {ref.name: shelf.payload(ref)}
    requested, answered = (b"".join(map(bytes, way)) for way in (tap.from_client, tap.from_server))
    return requested, answered, ticket, shelf.payload(ref)[1000:1100]


@pytest.mark.parametrize("server_mode", ENCRYPTION_MODES)
@pytest.mark.parametrize("client_mode", ENCRYPTION_MODES)
def test_either_end_can_require_encryption(shelf, serving, client_mode, server_mode):
    requested, answered, ticket, words = fetch_through_tap(shelf, serving(server_mode), client_mode)
    is_readable = client_mode == server_mode == NEVER

    assert (words in answered) == is_readable
    assert (ticket in requested) == is_readable


def test_compressed_slices_are_encrypted(shelf, serving):
    magic = b"\x28\xb5\x2f\xfd"  # of zstd
    assert magic in fetch_through_tap(shelf, serving(NEVER), NEVER, slow_link)[1]
    assert magic not in fetch_through_tap(shelf, serving(AUTO), AUTO, slow_link)[1]


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("server", [True, False])
def test_auto_mode_is_unencrypted_only_if_both_ends_see_a_cable(
    shelf, serving, cabled, client, server
):
    note_port = cabled(client=client, server=server)
    serves = serving(AUTO)
    note_port(serves.addresses()[0].port)
    _, answered, _, words = fetch_through_tap(shelf, serves, AUTO)

    assert (words in answered) == (client and server)


def test_always_mode_encrypts_cables(shelf, serving, cabled):
    note_port = cabled(client=True, server=True)
    serves = serving(ALWAYS)
    note_port(serves.addresses()[0].port)

    _, answered, _, words = fetch_through_tap(shelf, serves, AUTO)
    assert words not in answered


DOWNGRADES = {
    "the client asked for nothing": ("client", Hello, lambda m: replace(m, encrypts=False)),
    "the server agreed to nothing": ("server", Challenge, lambda m: replace(m, encrypts=False)),
}


@pytest.mark.parametrize(
    ("downgrade", "modes"),
    [
        ("the client asked for nothing", (AUTO, NEVER)),
        ("the client asked for nothing", (AUTO, AUTO)),
        ("the server agreed to nothing", (AUTO, NEVER)),
        ("the server agreed to nothing", (NEVER, AUTO)),
        ("the server agreed to nothing", (AUTO, AUTO)),
    ],
)
def test_encryption_downgrade_by_a_man_in_the_middle_is_refused(shelf, serving, downgrade, modes):
    side, kind, change = DOWNGRADES[downgrade]
    server = serving(modes[1])
    ref = shelf.add(SIZE)
    seen = []

    def meddle(unit):
        seen.append(unit.raw)
        is_it = isinstance(unit.message, kind) and unit.message.encrypts
        return encode_frame(change(unit.message)) if is_it else unit.raw

    port = server.addresses()[0].port
    refused = pytest.raises(FabricError, match="key")
    with MeddlingProxy(("127.0.0.1", port), [meddle] * 50, side=side) as proxy, refused:
        fetch([loopback(proxy.port)], offer(server, [ref]), [ref], encrypt_links=modes[0])
    assert shelf.payload(ref)[:100] not in b"".join(seen)


def test_peer_refusing_encryption_gets_no_request():
    """Even a peer that holds the key gets no plain text."""

    def act(channel, sock):
        hello = channel.receive(Hello)
        assert hello.encrypts
        proof = prove(KEY, HandshakeRole.SERVER, hello, b"s" * 32, encrypts=False)
        channel.send(Challenge(b"s" * 32, proof, encrypts=False))
        seen.append(answer_of(sock))

    seen = []
    with impostor(act) as address:
        channel = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE).dial(address)
        with pytest.raises(RejectedError, match="does not encrypt"):
            Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE).authenticate(channel)
        channel.close()
    assert seen == [b""]


@pytest.mark.parametrize("seed", range(12))
def test_single_changed_byte_ends_one_connection_only(shelf, serving, seed):
    chance = random.Random(seed)
    server = serving(AUTO)
    refs = [shelf.add(SIZE), shelf.add(SIZE, 1)]
    kept = Connections()
    faults = [Fault(flip_at=chance.randrange(200 if seed % 2 else 2 * SIZE))]
    with FaultProxy(("127.0.0.1", server.addresses()[0].port), faults) as proxy:
        try:
            _, catch = fetch(
                [loopback(proxy.port)], offer(server, refs), refs, connections=kept, streams=1
            )
        except (FabricError, RejectedError):
            assert faults[0].flip_at < 200  # a failed handshake is reported, not repeated
        else:
            assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
        finally:
            kept.close()
