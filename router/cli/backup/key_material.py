"""Key material of a backup: the key of its files, and the fabric's own keys.

Without a key file it is stored as it is, readable by its owner only, as in a data folder: a backup
that needs a secret which was lost with the machine restores nothing. With one it is encrypted by
AES-256-GCM under a key that scrypt derives from that file.
"""

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fabric.codec import from_plain, parse_json, to_plain
from fabric.errors import RejectedError
from fabric.keys import AUTHORITY_CERTIFICATE, CLUSTER_FILE_KEYS, CLUSTER_KEY, SHIPPED_KEYS
from fabric.record.hibernation_file import SIGNING_KEY_BYTES
from router.cli.config_file import others_may_read
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.cli.keys import AUTHORITY_KEY, SALT_BYTES, signing_key
from router.limits import BACKUP_KEYS_BYTES_MAX
from router.private_files import write_private

FORMAT: Final = "macfabric-keys-1"
_NONCE_BYTES: Final = 12
_NAMES: Final = (CLUSTER_KEY, AUTHORITY_CERTIFICATE, AUTHORITY_KEY)


@dataclass(frozen=True, slots=True)
class KeyMaterial:
    """The key that signs a backup's files, and the content of the fabric's key files."""

    signing_key: str = field(repr=False)
    files: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> bytes:
        """Key for the header of hibernation files."""
        return bytes.fromhex(self.signing_key)


def new_key() -> str:
    """Return a new signing key in hex."""
    return secrets.token_hex(SIGNING_KEY_BYTES)


def find_keys(data: Path, chosen: Path | None) -> Path | None:
    """Return the folder of the fabric's keys on this machine; None if there is none."""
    folders = [chosen] if chosen else [data, Path(CLUSTER_FILE_KEYS), Path(SHIPPED_KEYS)]
    for folder in folders:
        if (folder.expanduser() / CLUSTER_KEY).exists():
            return folder.expanduser()
    if chosen:
        message = f"{chosen} has no {CLUSTER_KEY}"
        raise CommandError(message, MISUSED)
    return None


def read_keys(folder: Path) -> dict[str, str]:
    """Return the fabric's key files by name, those that are on this machine."""
    texts = {}
    for name in _NAMES:
        path = _path_of(folder, name)
        try:
            texts[name] = path.read_text()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            message = f"{path} cannot be read: {error}"
            raise CommandError(message) from None
    return texts


def write_keys(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write missing key files; raise CommandError if another fabric's are there."""
    written = []
    for name in _NAMES:
        path = _path_of(folder, name)
        if name not in files or (path.exists() and path.read_text() == files[name]):
            continue
        if path.exists():
            message = f"{path} belongs to another fabric: name another folder, or move it away"
            raise CommandError(message, MISUSED)
        written.append(name)
    for name in written:
        write_private(_path_of(folder, name), files[name])
    return written


def _path_of(folder: Path, name: str) -> Path:
    """Return a key file's path; `certs create` keeps the authority's key beside the folder."""
    is_made = folder.resolve() == Path(CLUSTER_FILE_KEYS).expanduser().resolve()
    return (folder.parent if name == AUTHORITY_KEY and is_made else folder) / name


def write_material(path: Path, material: KeyMaterial, key_file: Path | None) -> None:
    """Write key material, encrypted if there is a key file."""
    plain = to_plain(material)
    if key_file is None:
        row = {"format": FORMAT, **plain}
    else:
        salt, nonce = secrets.token_bytes(SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
        sealed = _cipher(key_file, salt).encrypt(nonce, json.dumps(plain).encode(), _bound(salt))
        row = {"format": FORMAT, "salt": salt.hex(), "nonce": nonce.hex()}
        row["sealed"] = base64.b64encode(sealed).decode()
    try:
        write_private(path, json.dumps(row, indent=1))
    except OSError as error:
        raise CommandError(describe_os_error(error, path)) from None


def read_material(path: Path, key_file: Path | None) -> KeyMaterial:
    """Read key material; raise CommandError without, or for a wrong, key file."""
    try:
        with path.open("rb") as file:
            raw = file.read(BACKUP_KEYS_BYTES_MAX)
        is_open = others_may_read(path)
    except OSError as error:
        raise CommandError(describe_os_error(error, path)) from None
    try:
        row = _parse(raw)
        if "sealed" in row:
            row = _unseal_row(row, key_file, path)
        elif is_open:
            message = f"{path} contains keys that other accounts can read: run chmod 600 {path}"
            raise CommandError(message, MISUSED)
        material: KeyMaterial = from_plain(KeyMaterial, row, "keys")
        _require_key(material)
    except (RejectedError, ValueError) as error:
        message = f"{path} is damaged: {error}"
        raise CommandError(message) from None
    return material


def _parse(raw: bytes) -> dict[str, Any]:
    row: Any = parse_json(raw)
    if not isinstance(row, dict) or row.pop("format", None) != FORMAT:
        message = f"its format is not {FORMAT!r}"
        raise RejectedError(message)
    return row


def _require_key(material: KeyMaterial) -> None:
    if len(material.key) != SIGNING_KEY_BYTES:
        message = f"its signing key does not have {SIGNING_KEY_BYTES} bytes"
        raise RejectedError(message)


def _unseal_row(row: dict[str, Any], key_file: Path | None, path: Path) -> Any:
    if key_file is None:
        message = f"{path} is encrypted; name its key file with --key-file"
        raise CommandError(message, MISUSED)
    salt, nonce = bytes.fromhex(str(row.get("salt"))), bytes.fromhex(str(row.get("nonce")))
    sealed = base64.b64decode(str(row.get("sealed")), validate=True)
    try:
        raw = _cipher(key_file, salt).decrypt(nonce, sealed, _bound(salt))
    except InvalidTag:
        message = f"{path} was encrypted with another key file than {key_file}, or is damaged"
        raise CommandError(message) from None
    return parse_json(raw)


def _cipher(key_file: Path, salt: bytes) -> AESGCM:
    derived = signing_key(key_file, salt)
    return AESGCM(blake2b(digest_size=32, key=derived, person=b"mf-backup-keys").digest())


def _bound(salt: bytes) -> bytes:
    """Return the data that the encryption authenticates besides the content."""
    return FORMAT.encode() + salt
