"""Signing keys derived from a key file, which holds random bytes or a passphrase."""

import hashlib
import os
import stat
from pathlib import Path

from fabric.limits import MIB
from fabric.record.hibernation_file import SIGNING_KEY_BYTES
from router.cli.errors import MISUSED, CommandError
from router.limits import HIBERNATION_KEY_FILE_BYTES_MAX, HIBERNATION_KEY_FILE_BYTES_MIN

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
