"""Certificates: their holders, their names and their expiry."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from fabric.keys import MEMBER_NAME
from router.tls.authority import (
    MEMBER_VALID,
    Subject,
    belongs,
    expires_at,
    is_issued_by,
    issue_member,
    make_authority,
    subject_of,
)

NOW = datetime.now(UTC)
HOSTS = Subject.of(["studio.local", "192.168.1.10", "127.0.0.1", "::1"])


def contexts(folder, server, client, trusted_by_server, trusted_by_client):
    """Return both ends' contexts; None: no certificate."""
    ends = []
    for side, pair, trusted in (
        (ssl.PROTOCOL_TLS_SERVER, server, trusted_by_server),
        (ssl.PROTOCOL_TLS_CLIENT, client, trusted_by_client),
    ):
        context = ssl.SSLContext(side)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
        context.load_verify_locations(cadata=trusted.decode())
        if pair is not None:
            file = folder / f"{len(ends)}.pem"
            file.write_bytes(pair.certificate + pair.key)
            context.load_cert_chain(file)
        ends.append(context)
    return ends


def handshake(server, client, name):
    """Perform a handshake in memory; raise the error of either end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=name),
    ]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_members_verify_each_other_by_name_and_address(tmp_path):
    authority = make_authority("a", NOW)
    member = issue_member(authority, HOSTS, NOW)
    ends = contexts(tmp_path, member, member, authority.certificate, authority.certificate)

    for name in (MEMBER_NAME, "studio.local", "192.168.1.10", "::1"):
        handshake(*ends, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(*ends, "192.168.1.99")


def test_client_without_valid_certificate_is_refused(tmp_path):
    authority, other = make_authority("a", NOW), make_authority("b", NOW)
    member, stranger = issue_member(authority, HOSTS, NOW), issue_member(other, HOSTS, NOW)

    for client in (None, stranger):
        ends = contexts(tmp_path, member, client, authority.certificate, authority.certificate)
        with pytest.raises(ssl.SSLError):
            handshake(*ends, MEMBER_NAME)


def test_server_of_another_authority_is_refused(tmp_path):
    authority, other = make_authority("a", NOW), make_authority("a", NOW)
    member, impostor = issue_member(authority, HOSTS, NOW), issue_member(other, HOSTS, NOW)
    ends = contexts(tmp_path, impostor, member, authority.certificate, authority.certificate)

    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(*ends, MEMBER_NAME)


def test_member_cannot_issue_certificates(tmp_path):
    authority = make_authority("a", NOW)
    member = issue_member(authority, HOSTS, NOW)
    forged = issue_member(member, HOSTS, NOW)
    ends = contexts(tmp_path, member, forged, authority.certificate, authority.certificate)
    ends[1].load_verify_locations(cadata=member.certificate.decode())

    with pytest.raises(ssl.SSLError):
        handshake(*ends, MEMBER_NAME)


def test_certificate_fields_are_read_back():
    authority = make_authority("a", NOW)
    member = issue_member(authority, HOSTS, NOW)

    assert subject_of(member.certificate) == HOSTS
    assert expires_at(member.certificate) == NOW.replace(microsecond=0) + MEMBER_VALID
    # Apple's clients refuse a server's certificate that is valid for longer.
    found = x509.load_pem_x509_certificate(member.certificate)
    assert found.not_valid_after_utc - found.not_valid_before_utc <= timedelta(days=825)
    assert is_issued_by(member.certificate, authority.certificate)
    assert not is_issued_by(member.certificate, make_authority("a", NOW).certificate)
    assert belongs(member.certificate, member.key)
    assert not belongs(member.certificate, authority.key)
