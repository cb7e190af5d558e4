"""Folder of a backup, and the list of what is in it.

backup.json   agents with their files, sizes and checksums        agents/*.mfa   one file each
keys.json     the key that signs the files; the fabric's own keys (key_material.py)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Final

import fabric
from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import RejectedError
from router.cli.data_folder import make_private_folder
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.client.http_api import CHUNK_BYTES
from router.limits import BACKUP_AGENTS_MAX, BACKUP_LIST_BYTES_MAX
from router.private_files import write_private

FORMAT: Final = "macfabric-backup-1"
LIST: Final = "backup.json"
KEYS: Final = "keys.json"
AGENTS: Final = "agents"
_FILE: Final = re.compile(r"[0-9a-f]{32}\.mfa")
_VALUES_PER_AGENT: Final = 32  # of the list, for the bound of its JSON


@dataclass(frozen=True, slots=True)
class BackupAgent:
    """Agent in the list of a backup."""

    tenant: str | None  # None: the tenant of the key that it was saved with
    id: str
    file: str
    bytes: int
    sha256: str
    tokens: int
    epoch: int
    revision: int
    model: str
    fingerprint: str
    saved_at: str

    @property
    def key(self) -> tuple[str, str]:
        """Name of the agent among all tenants."""
        return self.tenant or "", self.id


@dataclass(frozen=True, slots=True)
class BackupList:
    """Contents of a backup."""

    format: str = FORMAT
    by: str = f"macfabric {fabric.__version__}"
    fabric: str | None = None  # digest of the cluster's key; None: that is not known here
    began_at: str = ""
    ended_at: str | None = None  # None: the last run was interrupted
    agents_count: int = 0
    failed_count: int = 0  # of the last run
    agents: tuple[BackupAgent, ...] = ()

    def with_agents(self, agents: dict[tuple[str, str], BackupAgent]) -> "BackupList":
        """Return the list with these agents, in order of their names."""
        ordered = tuple(agents[key] for key in sorted(agents))
        return replace(self, agents=ordered, agents_count=len(ordered))


@dataclass(frozen=True, slots=True)
class BackupFolder:
    """Paths of a backup."""

    path: Path

    @property
    def list(self) -> Path:
        """Path of the list of contents."""
        return self.path / LIST

    @property
    def keys(self) -> Path:
        """Path of the key material."""
        return self.path / KEYS

    def file_of(self, agent: BackupAgent) -> Path:
        """Return the path of an agent's file."""
        return self.path / AGENTS / agent.file

    def prepare(self, fabric_id: str | None) -> BackupList:
        """Create the folder, or continue the backup in it; raise CommandError for other files."""
        try:
            is_used = self.path.exists() and any(self.path.iterdir())
        except OSError as error:
            raise CommandError(describe_os_error(error, self.path), MISUSED) from None
        if is_used and not self.list.exists():
            message = f"{self.path} is neither empty nor a backup: name a new or empty folder"
            raise CommandError(message, MISUSED)
        backup = self.read() if is_used else BackupList(fabric=fabric_id)
        if backup.fabric is not None and fabric_id is not None and backup.fabric != fabric_id:
            message = f"{self.path} is a backup of another fabric: name another folder"
            raise CommandError(message, MISUSED)
        try:
            for folder in (self.path, self.path / AGENTS):
                make_private_folder(folder)
        except OSError as error:
            raise CommandError(describe_os_error(error, self.path), MISUSED) from None
        return replace(backup, fabric=backup.fabric or fabric_id)

    def read(self) -> BackupList:
        """Return the list; raise CommandError if there is none, or it is damaged."""
        try:
            with self.list.open("rb") as file:
                raw = file.read(BACKUP_LIST_BYTES_MAX + 1)
        except FileNotFoundError:
            message = f"{self.path} is not a backup: it has no {LIST}"
            raise CommandError(message, MISUSED) from None
        except OSError as error:
            raise CommandError(describe_os_error(error, self.list), MISUSED) from None
        try:
            return _parse(raw)
        except RejectedError as error:
            message = f"{self.list} is damaged: {error.message}"
            raise CommandError(message) from None

    def write(self, contents: BackupList) -> None:
        """Replace the list."""
        try:
            write_private(self.list, dump_json(contents).decode())
        except OSError as error:
            raise CommandError(describe_os_error(error, self.list)) from None

    def damage_reason(self, agent: BackupAgent) -> str | None:
        """Return why an agent's file is damaged; None if it is the one that was saved."""
        try:
            size = self.file_of(agent).stat().st_size
            if size != agent.bytes:
                return f"its file has {size} bytes instead of {agent.bytes}"
            digest = checksum(self.file_of(agent))
        except OSError as error:
            return describe_os_error(error)
        return None if digest == agent.sha256 else "the checksum of its file differs from the list"


def _parse(raw: bytes) -> BackupList:
    """Read a list of contents; raise RejectedError if it is damaged, or of another version."""
    plain: Any = parse_json(raw, BACKUP_AGENTS_MAX * _VALUES_PER_AGENT)
    version = plain.get("format") if isinstance(plain, dict) else None
    if version != FORMAT:
        message = f"its format is {version!r}, but this version reads only {FORMAT!r}"
        raise RejectedError(message)
    contents: BackupList = from_plain(BackupList, plain, LIST)
    for agent in contents.agents:
        if _FILE.fullmatch(agent.file) is None:
            message = f"{agent.file!r} is not a valid name of an agent's file"
            raise RejectedError(message)
    return contents


def file_name(tenant: str | None, agent: str) -> str:
    """Return the name of an agent's file; it does not show the agent's."""
    whole = f"{tenant or ''}\0{agent}".encode()
    return f"{blake2b(whole, digest_size=16, person=b'mf-backup').hexdigest()}.mfa"


def fabric_id(cluster_key: str | None) -> str | None:
    """Return a digest by which a backup recognizes its fabric."""
    if cluster_key is None:
        return None
    return blake2b(cluster_key.strip().encode(), digest_size=16, person=b"mf-backup").hexdigest()


def checksum(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    digest = sha256()
    for chunk in chunks_of(path):
        digest.update(chunk)
    return digest.hexdigest()


def chunks_of(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
