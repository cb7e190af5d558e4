"""Blocks go only to peers that prove the key, and only those that a ticket names."""

from dataclasses import fields, replace

import pytest

from fabric import PROTOCOL_VERSION
from fabric.errors import ConflictError, RejectedError, UnauthorizedError
from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, Fingerprint, MigrationId, NodeName, TenantId
from fabric.net.ticket import issue_ticket, open_ticket
from fabric.net.wire import Challenge, FetchRequest, Hello, Proof, Refusal, encode_frame
from node.limits import OFFER_LIFE_S_MAX
from tests.faults.fault_proxy import FaultProxy
from tests.support.clocks import ManualClock
from tests.support.transfers import (
    FINGERPRINT,
    KEY,
    MIGRATION,
    SOURCE,
    TARGET,
    Shelf,
    answer_of,
    dialled,
    fetch,
    impostor,
    loopback,
    offer,
    part,
    serve,
)

OTHER_KEY = b"k" * 32
STRANGER = NodeName("mac-x")


def hello(**changes):
    return replace(Hello(TARGET, SOURCE, FINGERPRINT, b"n" * 32), **changes)


# --- keys, names, versions -------------------------------------------------------------------


def test_wrong_cluster_key_is_refused_by_both_ends(shelf, server, port):
    ref = shelf.add(1_000)
    ticket = offer(server, [ref])

    with pytest.raises(UnauthorizedError, match="the server does not hold"):
        fetch([loopback(port)], ticket, [ref], cluster_key=OTHER_KEY)
    with dialled(port) as (channel, sock):
        channel.send(hello())
        channel.receive(Challenge)
        channel.send(Proof(b"p" * 32), FetchRequest(ticket, (part(ref),)))
        refusal = channel.receive(Refusal)

        assert refusal.code == "bad_key"
        assert answer_of(sock) == b""
    assert shelf.opened == 0


def test_reflected_proof_is_refused(shelf, server, port):
    with dialled(port) as (channel, _):
        channel.send(hello())
        challenge = channel.receive(Challenge)
        channel.send(Proof(challenge.proof))

        assert channel.receive(Refusal).code == "bad_key"


def test_session_replayed_to_the_server_is_refused(shelf, server, port, monkeypatch):
    monkeypatch.setattr("node.net.channel.LINGER_S", 60.0)  # a busy machine reads refusals late
    ref = shelf.add(5_000)
    with FaultProxy(("127.0.0.1", port)) as proxy:
        fetch([loopback(proxy.port)], offer(server, [ref]), [ref])
        recorded = bytes(proxy.from_client[0])
    opened = shelf.opened

    with dialled(port) as (_, sock):
        sock.sendall(recorded)
        answer = answer_of(sock)

    assert b"bad_key" in answer
    assert len(answer) < 1_000
    assert shelf.opened == opened


def test_session_replayed_to_a_client_is_refused(shelf, server, port):
    ref = shelf.add(5_000)
    ticket = offer(server, [ref])
    with FaultProxy(("127.0.0.1", port)) as proxy:
        fetch([loopback(proxy.port)], ticket, [ref])
        recorded = bytes(proxy.from_server[0])

    parrot = impostor(lambda _, sock: sock.sendall(recorded))
    with parrot as address, pytest.raises(UnauthorizedError, match="the server does not hold"):
        fetch([address], ticket, [ref])


def test_impostor_learns_no_ticket(shelf, server):
    ref = shelf.add(5_000)
    ticket = offer(server, [ref])
    bytes_received = []

    def listen(channel, sock):
        channel.receive(Hello)
        channel.send(Challenge(b"n" * 32, b"p" * 32))
        bytes_received.append(answer_of(sock))

    with impostor(listen) as address, pytest.raises(UnauthorizedError):
        fetch([address], ticket, [ref])

    assert bytes_received == [b""]


def test_fetch_for_another_model_is_refused_with_reason(shelf, server, port):
    ref = shelf.add(1_000)

    with pytest.raises(ConflictError, match="different models") as caught:
        fetch([loopback(port)], offer(server, [ref]), [ref], fingerprint=Fingerprint(b"g" * 32))

    assert caught.value.code == "fingerprint_mismatch"


def test_address_taken_by_another_node_is_skipped(shelf, server, port, tmp_path):
    ref = shelf.add(1_000)
    ticket = offer(server, [ref])
    other = serve(Shelf(tmp_path), SystemClock(), name=STRANGER)
    reused = other.addresses()[0]

    _, catch = fetch([reused, loopback(port)], ticket, [ref])
    with pytest.raises(RejectedError) as caught:
        fetch([reused], ticket, [ref])
    other.stop()

    assert list(catch.blocks) == [ref.name]
    assert caught.value.code == "wrong_node"


def test_other_protocol_version_is_refused_by_both_ends(shelf, server, port):
    ref = shelf.add(1_000)
    newer = bytearray(encode_frame(hello()))
    newer[2] = PROTOCOL_VERSION + 1

    with dialled(port) as (channel, sock):
        sock.sendall(newer)
        refusal = channel.receive(Refusal)
    stranger = impostor(lambda _, sock: sock.sendall(newer))
    with stranger as address, pytest.raises(RejectedError) as caught:
        fetch([address], offer(server, [ref]), [ref])

    assert refusal.code == caught.value.code == "protocol_version"
    assert f"protocol {PROTOCOL_VERSION + 1}" in refusal.message


# --- tickets ---------------------------------------------------------------------------------


def refusal_code(port, ticket, refs, **changes):
    with pytest.raises(RejectedError) as caught:
        fetch([loopback(port)], ticket, refs, **changes)
    return caught.value.code


FORGED = {
    "migration": MigrationId("migration-2"),
    "tenant": TenantId("other"),
    "agent": AgentId("agent-2"),
    "source": STRANGER,
    "target": STRANGER,
    "epoch": 4,
    "blocks_digest": b"d" * 32,
    "nonce": b"o" * 16,
}


@pytest.mark.parametrize("field", FORGED)
def test_ticket_changed_in_any_field_is_refused_even_if_resigned(shelf, server, port, field):
    ref = shelf.add(1_000)
    ticket = open_ticket(KEY, offer(server, [ref]))
    assert {f.name for f in fields(ticket)} == set(FORGED)
    forged = issue_ticket(KEY, replace(ticket, **{field: FORGED[field]}))

    assert refusal_code(port, forged, [ref]) == "bad_ticket"
    assert shelf.opened == 0


def test_damaged_or_foreign_signed_ticket_is_refused(shelf, server, port):
    ref = shelf.add(1_000)
    raw = offer(server, [ref])
    flipped = [raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in range(0, len(raw), 23)]

    for forged in [*flipped, raw[:-1], raw[:10], issue_ticket(OTHER_KEY, open_ticket(KEY, raw))]:
        assert refusal_code(port, forged, [ref]) == "bad_ticket"
    assert shelf.opened == 0


def test_ticket_is_valid_for_its_named_target_only(shelf, server, port):
    ref = shelf.add(1_000)

    assert refusal_code(port, offer(server, [ref]), [ref], name=STRANGER) == "bad_ticket"


def test_ticket_ends_on_expiry_withdrawal_or_server_stop(shelf):
    clock = ManualClock()
    server = serve(shelf, clock)
    port = server.addresses()[0].port
    ref = shelf.add(1_000)
    expiring = offer(server, [ref], MIGRATION, valid_s=30)
    withdrawn = offer(server, [ref], MigrationId("migration-2"), valid_s=30)
    server.offers.withdraw(MigrationId("migration-2"))

    assert refusal_code(port, withdrawn, [ref]) == "bad_ticket"
    clock.now_s += 30
    assert refusal_code(port, expiring, [ref]) == "ticket_expired"
    server.stop()

    restarted = serve(shelf, clock)
    assert refusal_code(restarted.addresses()[0].port, expiring, [ref]) == "bad_ticket"
    restarted.stop()


def test_long_copy_renews_its_ticket_up_to_a_limit(shelf):
    clock = ManualClock()
    server = serve(shelf, clock)
    port = server.addresses()[0].port
    ref = shelf.add(1_000)
    began_s, ticket = clock.now_s, offer(server, [ref], valid_s=600)
    fetched = 0
    while clock.now_s + 599 < began_s + OFFER_LIFE_S_MAX:
        clock.now_s += 599
        fetched += fetch([loopback(port)], ticket, [ref])[0].blocks
    assert fetched == OFFER_LIFE_S_MAX // 599
    clock.now_s = began_s + OFFER_LIFE_S_MAX

    assert refusal_code(port, ticket, [ref]) == "ticket_expired"
    server.stop()


def test_repeated_offer_renews_ticket_and_coexists_with_final_offer(shelf):
    clock = ManualClock()
    server = serve(shelf, clock)
    port = server.addresses()[0].port
    first, tail = shelf.add(1_000), shelf.add(500)

    ticket = offer(server, [first], valid_s=10)
    clock.now_s += 9
    assert offer(server, [first], valid_s=10) == ticket
    final = offer(server, [first, tail], valid_s=10)
    clock.now_s += 9

    assert fetch([loopback(port)], ticket, [first])[0].blocks == 1
    assert fetch([loopback(port)], final, [first, tail])[0].blocks == 2
    server.stop()


def test_ticket_covers_its_own_blocks_only(shelf, server, port):
    mine, other = shelf.add(1_000), shelf.add(2_000)
    ticket = offer(server, [mine])
    offer(server, [other], MigrationId("migration-2"))
    swapped = replace(mine, checksum=other.checksum)

    assert refusal_code(port, ticket, [other]) == "not_offered"
    assert refusal_code(port, ticket, [mine, other]) == "not_offered"
    assert refusal_code(port, ticket, [swapped]) == "not_offered"
    assert shelf.opened == 0
