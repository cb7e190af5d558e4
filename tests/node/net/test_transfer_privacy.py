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
    """Let connections of this machine pass for a cable at whichever ends say so."""

    def lay(*, client, server):
        def is_on_cable(channel):
            is_server = channel._sock.getsockname()[1] == ports[0]
            return server if is_server else client

        ports = []
        monkeypatch.setattr(Channel, "is_on_cable", is_on_cable)
        return ports.append

    return lay


def carried(shelf, server, mode, address=loopback):
    """Fetch a block through a tap; return what passed it, and whether the block came."""
    ref = shelf.add(SIZE, noise=address is loopback)
    ticket = offer(server, [ref])
    kept = Connections()
    with FaultProxy(("127.0.0.1", server.addresses()[0].port)) as tap:
        link = address(tap.port)
        _, catch = fetch([link], ticket, [ref], connections=kept, encrypt_links=mode)
        kept.close()
    assert catch.blocks == {ref.name: shelf.payload(ref)}
    asked, answered = (b"".join(map(bytes, way)) for way in (tap.from_client, tap.from_server))
    return asked, answered, ticket, shelf.payload(ref)[1000:1100]


@pytest.mark.parametrize("server_mode", ENCRYPTION_MODES)
@pytest.mark.parametrize("client_mode", ENCRYPTION_MODES)
def test_either_end_may_ask_for_encryption(shelf, serving, client_mode, server_mode):
    asked, answered, ticket, words = carried(shelf, serving(server_mode), client_mode)
    is_readable = client_mode == server_mode == NEVER

    assert (words in answered) == is_readable
    assert (ticket in asked) == is_readable


def test_what_is_compressed_is_encrypted_too(shelf, serving):
    magic = b"\x28\xb5\x2f\xfd"  # of zstd
    assert magic in carried(shelf, serving(NEVER), NEVER, slow_link)[1]
    assert magic not in carried(shelf, serving(AUTO), AUTO, slow_link)[1]


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("server", [True, False])
def test_a_link_is_readable_only_where_both_ends_see_a_cable(
    shelf, serving, cabled, client, server
):
    note_port = cabled(client=client, server=server)
    serves = serving(AUTO)
    note_port(serves.addresses()[0].port)
    _, answered, _, words = carried(shelf, serves, AUTO)

    assert (words in answered) == (client and server)


def test_always_encrypts_cables_too(shelf, serving, cabled):
    note_port = cabled(client=True, server=True)
    serves = serving(ALWAYS)
    note_port(serves.addresses()[0].port)

    _, answered, _, words = carried(shelf, serves, AUTO)
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
def test_nobody_on_the_way_talks_the_ends_out_of_it(shelf, serving, downgrade, modes):
    side, kind, change = DOWNGRADES[downgrade]
    server = serving(modes[1])
    ref = shelf.add(SIZE)
    heard = []

    def meddle(unit):
        heard.append(unit.raw)
        is_it = isinstance(unit.message, kind) and unit.message.encrypts
        return encode_frame(change(unit.message)) if is_it else unit.raw

    port = server.addresses()[0].port
    refused = pytest.raises(FabricError, match="key")
    with MeddlingProxy(("127.0.0.1", port), [meddle] * 50, side=side) as proxy, refused:
        fetch([loopback(proxy.port)], offer(server, [ref]), [ref], encrypt_links=modes[0])
    assert shelf.payload(ref)[:100] not in b"".join(heard)


def test_a_peer_that_agrees_to_nothing_is_left():
    """Not even one that holds the key has anything sent to it in the clear."""

    def act(channel, sock):
        hello = channel.receive(Hello)
        assert hello.encrypts
        proof = prove(KEY, HandshakeRole.SERVER, hello, b"s" * 32, encrypts=False)
        channel.send(Challenge(b"s" * 32, proof, encrypts=False))
        heard.append(answer_of(sock))

    heard = []
    with impostor(act) as address:
        channel = Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE).dial(address)
        with pytest.raises(RejectedError, match="does not encrypt"):
            Peer(TARGET, SOURCE, KEY, FINGERPRINT, HASTE).authenticate(channel)
        channel.close()
    assert heard == [b""]


@pytest.mark.parametrize("seed", range(12))
def test_one_byte_changed_anywhere_ends_a_connection_and_no_more(shelf, serving, seed):
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
            assert faults[0].flip_at < 200  # a handshake gone wrong is told, not repeated
        else:
            assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
        finally:
            kept.close()
