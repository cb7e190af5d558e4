"""The two folders that a running node has open: its model's, and that of the tombstones.

A folder may vanish while the node runs: removed, moved away, or on a drive that was unplugged.
Until it is back, every write is refused (`PosixDisk`). It is made again where it was, but not on
another drive than the one that held it.
"""

from dataclasses import dataclass

from fabric.errors import FatalError
from fabric.record.manifest import Manifest
from fabric.record.spec_file import SpecRecord
from node.runtime.identity import NodeConfig
from node.store.agent_store import AgentStore
from node.store.encrypted_disk import EncryptedDisk, open_disk
from node.store.folder_format import keep_spec
from node.store.posix_disk import DiskError, PosixDisk
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class DataFolders:
    """A node's open folders; methods block on the disk."""

    config: NodeConfig
    disk: PosixDisk
    store: AgentStore
    erased: TombstoneStore
    spec: SpecRecord | None  # None: the folder holds none

    def are_here(self) -> bool:
        """Return whether both are the folders at their paths."""
        return self.disk.is_here() and self.erased.is_here()

    def restore(self) -> list[Manifest]:
        """Open the folders again, and make what is gone; return the records found there.

        Tombstones come first, so that no erased record is among those. Raises DiskError, and then
        every write is refused as before.
        """
        self.disk.require_mount()
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
        return self.store.find_again()

    def _require_key(self) -> None:
        """Mark a new folder that will hold encrypted files; raise DiskError for another key."""
        settings = self.config.settings
        try:
            found = open_disk(
                self.disk.root,
                settings.durability,
                self.config.cluster_key,
                encrypts=settings.encrypt_at_rest,
            )
        except FatalError as error:
            raise DiskError(error.message) from None
        found.close()
        if isinstance(found, EncryptedDisk) and not isinstance(self.disk, EncryptedDisk):
            message = "the folder that came back is encrypted, and the one before was not"
            raise DiskError(message)
