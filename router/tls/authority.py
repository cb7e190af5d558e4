"""Certificates of one fabric: its own authority, and the certificate of its members.

authority, made once ──signs──► member: shown by every node, router and Ray process,
to servers and to clients alike
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fabric.keys import MEMBER_NAME

AUTHORITY_VALID: Final = timedelta(days=3650)
MEMBER_VALID: Final = timedelta(days=820)  # Apple's clients refuse a server's over 825 days
RENEW_BEFORE: Final = timedelta(days=30)
CLOCK_SKEW: Final = timedelta(days=1)  # tolerated lag of a Mac's clock
_CURVE = ec.SECP256R1()  # the only kind that every TLS library here takes and that signs fast


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Subject:
    """Host names and addresses that a member's certificate is for."""

    names: frozenset[str]
    addresses: frozenset[str]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> "Subject":
        """Sort `hosts` into addresses and names."""
        names, addresses = set(), set()
        for host in hosts:
            try:
                addresses.add(str(ip_address(host)))
            except ValueError:
                names.add(host)
        return cls(frozenset(names), frozenset(addresses))


def make_authority(label: str, now: datetime) -> Pair:
    """Make an authority; `label` distinguishes it in a client's list of trusted ones."""
    key = ec.generate_private_key(_CURVE)
    name = _name(f"macfabric {label}")
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = _usage(signs_certificates=True)
    certificate = (
        _builder(name, key, now, AUTHORITY_VALID)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), False
        )
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue_member(authority: Pair, subject: Subject, now: datetime) -> Pair:
    """Issue a member's certificate and a new key for it."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey), "as made here"
    issuer_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    key = ec.generate_private_key(_CURVE)
    names = x509.SubjectAlternativeName(
        [
            x509.DNSName(MEMBER_NAME),
            *(x509.DNSName(name) for name in sorted(subject.names)),
            *(x509.IPAddress(ip_address(address)) for address in sorted(subject.addresses)),
        ]
    )
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(_name("macfabric member"), key, now, MEMBER_VALID)
        .issuer_name(issuer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(names, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def subject_of(certificate: bytes) -> Subject:
    """Return the hosts of a certificate; raise ValueError if it is not one."""
    parsed = x509.load_pem_x509_certificate(certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = names.get_values_for_type(x509.IPAddress)
    return Subject(
        frozenset(names.get_values_for_type(x509.DNSName)) - {MEMBER_NAME},
        frozenset(str(address) for address in addresses),
    )


def expires_at(certificate: bytes) -> datetime:
    """Return when a certificate expires; raise ValueError if it is not one."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def is_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Return whether an authority signed a certificate."""
    try:
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(
            x509.load_pem_x509_certificate(authority)
        )
    except (ValueError, TypeError, InvalidSignature):  # another's name, kind or signature
        return False
    return True


def belongs(certificate: bytes, key: bytes) -> bool:
    """Return whether a private key belongs to a certificate."""
    public = x509.load_pem_x509_certificate(certificate).public_key()
    return load_pem_private_key(key, None).public_key() == public


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, valid: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + valid)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
