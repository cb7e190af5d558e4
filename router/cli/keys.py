"""Keys on disk: the folder of a fabric's members, and files that sign hibernated agents.

cluster.key   ca.pem   member.pem   member.key   [ray.token]     on every Mac
authority.key                                                    only where it was made
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fabric.keys import (
    AUTHORITY_CERTIFICATE,
    CLUSTER_KEY,
    MEMBER_CERTIFICATE,
    MEMBER_KEY,
    RAY_TOKEN,
)
from fabric.limits import MIB
from fabric.record.hibernation_file import SIGNING_KEY_BYTES
from router.cli.errors import MISUSED, CommandError
from router.limits import HIBERNATION_KEY_FILE_BYTES_MAX, HIBERNATION_KEY_FILE_BYTES_MIN
from router.private_files import write_private
from router.tls.authority import (
    RENEW_BEFORE,
    Pair,
    Subject,
    belongs,
    expires_at,
    is_issued_by,
    issue_member,
    make_authority,
    subject_of,
)

AUTHORITY_KEY = "authority.key"
KEY_BYTES = 32
_LABEL_BYTES = 4
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """Folder of keys at `path`, with the authority's own key at `authority_key`."""

    path: Path
    authority_key: Path

    @classmethod
    def in_data(cls, path: Path) -> "KeyFolder":
        """Return the key folder of a fabric on one machine: its data folder."""
        return cls(path, path / AUTHORITY_KEY)

    @property
    def certificate(self) -> Path:
        return self.path / MEMBER_CERTIFICATE

    @property
    def authority(self) -> Path:
        """Path of the authority's certificate, which clients trust."""
        return self.path / AUTHORITY_CERTIFICATE

    def create(self, subject: Subject, now: datetime) -> list[str]:
        """Make missing keys, and renew a certificate that ends soon or lacks a host.

        Return a description of each change.
        """
        changes = []
        if not (self.path / CLUSTER_KEY).exists():
            write_private(self.path / CLUSTER_KEY, secrets.token_hex(KEY_BYTES))
            changes.append("made the cluster's key")
        self._check_cluster_key()
        if not self.authority.exists():
            self._make_authority(now)
            changes.append("made an authority for certificates")
        if (why := self.renewal_reason(subject, now)) is not None:
            self._issue(subject, now)
            changes.append(f"issued a certificate: {why}")
        return changes

    def rotate(self, subject: Subject, now: datetime, *, with_authority: bool) -> list[str]:
        """Replace the members' key and certificate, optionally with a new authority."""
        changes = self.create(subject, now) if not (self.path / CLUSTER_KEY).exists() else []
        if with_authority:
            self._make_authority(now)
            changes.append("made a new authority: clients that trusted the old one need its ca.pem")
        self._issue(subject, now)
        return [*changes, "issued a new key and certificate for all members"]

    def make_token(self, *, anew: bool) -> list[str]:
        if (self.path / RAY_TOKEN).exists() and not anew:
            return []
        write_private(self.path / RAY_TOKEN, secrets.token_hex(_TOKEN_BYTES))
        return ["made a password for Ray"]

    def renewal_reason(self, subject: Subject, now: datetime) -> str | None:
        """Return why the members' certificate must be renewed, or an empty text."""
        try:
            certificate, authority = self.certificate.read_bytes(), self.authority.read_bytes()
            key = (self.path / MEMBER_KEY).read_bytes()
            ends, named = expires_at(certificate), subject_of(certificate)
            if not is_issued_by(certificate, authority) or not belongs(certificate, key):
                return "the old one is from another authority, or its key does not match"
        except FileNotFoundError:
            return "there was none"
        except (OSError, ValueError) as error:
            return f"the old one cannot be read ({error})"
        if ends - now < RENEW_BEFORE:
            return f"the old one ends on {ends:%Y-%m-%d}"
        missing = (subject.names - named.names) | (subject.addresses - named.addresses)
        return f"the old one does not name {', '.join(sorted(missing))}" if missing else None

    def _check_cluster_key(self) -> None:
        path = self.path / CLUSTER_KEY
        try:
            is_key = len(bytes.fromhex(path.read_text())) == KEY_BYTES
        except OSError as error:
            message = f"{path}: {error.strerror}"
            raise CommandError(message) from None
        except ValueError:
            is_key = False
        if not is_key:
            message = (
                f"{path} is not a cluster key of {KEY_BYTES} bytes in hex: put back the copy "
                "you keep, or remove the file, and with it all that the nodes here have stored"
            )
            raise CommandError(message)

    def _make_authority(self, now: datetime) -> None:
        pair = make_authority(secrets.token_hex(_LABEL_BYTES), now)
        # The key first: if this is interrupted, `ca.pem` is missing and both are made again.
        self.authority.unlink(missing_ok=True)
        write_private(self.authority_key, pair.key.decode())
        write_private(self.authority, pair.certificate.decode())

    def _issue(self, subject: Subject, now: datetime) -> None:
        try:
            authority = Pair(self.authority.read_bytes(), self.authority_key.read_bytes())
        except OSError as error:
            message = (
                f"{error.filename}: {error.strerror}; without it no certificate can be issued. "
                "`macfabric certs rotate --authority` makes a new authority"
            )
            raise CommandError(message) from None
        if not belongs(authority.certificate, authority.key):
            message = f"{self.authority_key} is not the key of {self.authority}"
            raise CommandError(message)
        pair = issue_member(authority, subject, now)
        write_private(self.path / MEMBER_KEY, pair.key.decode())
        write_private(self.certificate, pair.certificate.decode())


SALT_BYTES = 16
# 32 MiB and some 80 ms per guess: a passphrase may be weaker than a key.
_COST, _BLOCK_SIZE, _LANES = 1 << 15, 8, 1
_MEMORY_BYTES_MAX = 64 * MIB


def signing_key(path: Path, salt: bytes) -> bytes:
    """Derive 32 bytes from a file's content and a salt, by scrypt.

    Source: Percival, Josefsson, RFC 7914.
    """
    secret = _read(path).rstrip(b"\r\n")  # editors append a newline
    if len(secret) < HIBERNATION_KEY_FILE_BYTES_MIN:
        message = f"{path}: a key file holds at least {HIBERNATION_KEY_FILE_BYTES_MIN} characters"
        raise CommandError(message, MISUSED)
    return hashlib.scrypt(
        secret,
        salt=salt,
        n=_COST,
        r=_BLOCK_SIZE,
        p=_LANES,
        maxmem=_MEMORY_BYTES_MAX,
        dklen=SIGNING_KEY_BYTES,
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(HIBERNATION_KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise CommandError(message, MISUSED) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"{path} can be read by others; run `chmod 600` on it first"
        raise CommandError(message, MISUSED)
    if len(raw) > HIBERNATION_KEY_FILE_BYTES_MAX:
        message = f"{path}: a key file holds at most {HIBERNATION_KEY_FILE_BYTES_MAX} bytes"
        raise CommandError(message, MISUSED)
    return raw
