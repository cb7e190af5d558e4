"""The two folders that a running node has open: its model's, and that of the tombstones.

A folder may vanish while the node runs: removed, moved away, or on a drive that was unplugged.
Until it is back, every write is refused (`PosixDisk`). It is recreated at its path, but only on
the drive that held it: a file in the folder identifies a drive that was mounted again.

    DIR/<node>/identity    32 random hex digits, written at the first start in this folder
"""

import errno
import logging
import re
import secrets
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fabric.errors import FabricError, FatalError
from fabric.record.manifest import Manifest
from fabric.record.spec_file import SpecRecord
from node.runtime.identity import NodeConfig
from node.store.agent_store import AgentStore
from node.store.encrypted_disk import EncryptedDisk, open_disk
from node.store.folder_format import keep_spec
from node.store.posix_disk import DiskError, PosixDisk
from node.store.tombstones import TombstoneStore

IDENTITY: Final = "identity"
_IDENTITY: Final = re.compile(rb"[0-9a-f]{32}")
_IDENTITY_BYTES: Final = 32

_log = logging.getLogger(__name__)


class OtherDriveError(DiskError):
    """The drive that is mounted at the folder's path is not the one that held it."""

    @property
    def reason(self) -> str:
        return (
            "another drive is mounted in its place, without this node's folder; mount the right "
            "one, or restart the node to begin on this one"
        )


@dataclass(frozen=True, slots=True)
class DriveIdentity:
    """Identity of a node's drive at the node's start."""

    folder: Path
    device: int = field(init=False)
    identity: bytes | None = field(init=False)  # None: the disk refused to store one

    def __post_init__(self) -> None:
        """Read the identity of the folder, or create one."""
        object.__setattr__(self, "device", _device_of(self.folder))
        identity = self._read()
        if identity is None:
            identity = secrets.token_hex(_IDENTITY_BYTES // 2).encode()
            try:
                self._write(identity)
                _log.info("began a new data folder, or one of an earlier version: %s", self.folder)
            except FabricError as error:
                _log.warning("cannot store the folder's identity: %s", error.message)
                identity = None
        object.__setattr__(self, "identity", identity)

    def require(self) -> None:
        """Raise OtherDriveError unless the folder is on the same drive as at the start."""
        if self.identity is None or _device_of(self.folder) == self.device:
            return
        if self._read() != self.identity:
            message = f"cannot open {self.folder}: another drive is mounted there"
            raise OtherDriveError(message, errno.ENODEV)

    def keep(self) -> None:
        """Store the identity again in a recreated folder."""
        if self.identity is not None and self._read() is None:
            with suppress(FabricError):
                self._write(self.identity)

    def _read(self) -> bytes | None:
        try:
            with closing(PosixDisk(self.folder, must_exist=True)) as disk:
                identity = disk.read(IDENTITY, _IDENTITY_BYTES)
        except (FabricError, FileNotFoundError):
            return None
        return identity if _IDENTITY.fullmatch(identity) else None

    def _write(self, identity: bytes) -> None:
        with closing(PosixDisk(self.folder, must_exist=True)) as disk:
            disk.publish(IDENTITY, [identity])


def _device_of(path: Path) -> int:
    """Return the device of a path, or of the nearest folder above it that exists."""
    for each in (path, *path.parents):
        with suppress(OSError):
            return each.stat().st_dev
    return 0


@dataclass(frozen=True, slots=True)
class DataFolders:
    """A node's open folders; methods block on the disk."""

    config: NodeConfig
    disk: PosixDisk
    store: AgentStore
    erased: TombstoneStore
    spec: SpecRecord | None  # None: the folder holds none
    drive: DriveIdentity

    def are_here(self) -> bool:
        """Return whether both open folders are still the ones at their paths."""
        return self.disk.is_here() and self.erased.is_here()

    def restore(self) -> list[Manifest]:
        """Reopen the folders, create the missing ones, and return the records found.

        Tombstones are read first, so that no erased record is returned. After a DiskError every
        write is refused as before.
        """
        self.disk.require_mount()
        self.drive.require()
        if not self.erased.is_here():
            self.erased.reopen()
        self._require_key()
        self.store.forget_stored()
        self.disk.reopen()
        self.disk.recover_temporaries()
        if isinstance(self.disk, EncryptedDisk):
            self.disk.encrypt_all()
        if self.spec is not None:
            keep_spec(self.disk, self.spec)
        self.drive.keep()
        return self.store.find_again()

    def _require_key(self) -> None:
        """Mark a new folder that will hold encrypted files; raise DiskError for another key."""
        settings = self.config.settings
        try:
            reopened_disk = open_disk(
                self.disk.root,
                settings.durability,
                self.config.cluster_key,
                encrypts=settings.encrypt_at_rest,
            )
        except FatalError as error:
            raise DiskError(error.message) from None
        reopened_disk.close()
        if isinstance(reopened_disk, EncryptedDisk) and not isinstance(self.disk, EncryptedDisk):
            message = "the folder that came back is encrypted, but the one before it was not"
            raise DiskError(message)
