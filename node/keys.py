"""Credentials of a node: the cluster key and a certificate, read from files on its Mac."""

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

from fabric.errors import FatalError
from fabric.keys import (
    AUTHORITY_CERTIFICATE,
    CLUSTER_KEY,
    KEYS_DIGEST_BYTES,
    MEMBER_CERTIFICATE,
    MEMBER_KEY,
)

_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys in one folder."""

    folder: Path
    cluster_key: bytes = field(repr=False)
    digest: str  # identifies the folder without revealing its keys

    def server_context(self) -> ssl.SSLContext:
        """Return the server's TLS context, which admits members of the fabric only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections are not resumed
        try:
            context.load_verify_locations(self.folder / AUTHORITY_CERTIFICATE)
            context.load_cert_chain(self.folder / MEMBER_CERTIFICATE, self.folder / MEMBER_KEY)
        except (OSError, ssl.SSLError) as error:
            message = (
                f"{self.folder}: invalid certificates ({error}); replace them with "
                "`macfabric certs rotate`"
            )
            raise FatalError(message) from None
        return context


def certificate_ends_s(folder: Path) -> float | None:
    """Return when the first of a folder's certificates ends; None if none can be read."""
    ends = []
    for name in (AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE):
        with suppress(OSError, ValueError):
            certificate = load_pem_x509_certificate((folder / name).read_bytes())
            ends.append(certificate.not_valid_after_utc.timestamp())
    return min(ends, default=None)


def read_keys(folder: Path) -> Keys:
    """Read a folder of keys; raise FatalError if one is missing or readable by others."""
    parts = {
        name: _read(folder / name)
        for name in (CLUSTER_KEY, AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE, MEMBER_KEY)
    }
    key = read_cluster_key(folder)
    digest = blake2b(digest_size=KEYS_DIGEST_BYTES, person=b"mf-keys", key=key)
    for name in (AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE):
        digest.update(len(parts[name]).to_bytes(8, "big") + parts[name])
    return Keys(folder, key, digest.hexdigest())


def read_cluster_key(folder: Path) -> bytes:
    """Read the key that all nodes and routers of the fabric share; raise FatalError without it."""
    path = folder / CLUSTER_KEY
    try:
        return bytes.fromhex(_read(path).decode())
    except ValueError as error:
        message = f"{path} is not a cluster key in hex digits ({type(error).__name__})"
        raise FatalError(message) from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read()
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        message = (
            f"{path}: {error.strerror}; `macfabric up` creates the keys of one machine, "
            "`macfabric certs create cluster.yaml` those that `ray up` copies to every Mac"
        )
        raise FatalError(message) from None
    if mode & _OTHERS and not path.name.endswith(".pem"):
        message = f"{path} is readable by other users; run `chmod 600 {path}`"
        raise FatalError(message)
    return raw
