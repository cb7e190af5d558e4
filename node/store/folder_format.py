"""Cache spec file next to the blocks that it describes, checked at every start of a node."""

import logging
from typing import Final

from fabric.errors import CorruptDataError
from fabric.limits import SPEC_BYTES_MAX
from fabric.ports import Disk
from fabric.record.spec_file import SpecRecord, decode_spec, encode_spec
from node.store.posix_disk import DiskError

SPEC_FILE: Final = "model.spec"

_log = logging.getLogger(__name__)


def read_spec(disk: Disk) -> SpecRecord | None:
    """Return the folder's spec, or None if it has none; raise CorruptDataError in doubt."""
    try:
        return decode_spec(disk.read(SPEC_FILE, SPEC_BYTES_MAX))
    except FileNotFoundError:
        return None


def keep_spec(disk: Disk, record: SpecRecord) -> None:
    """Publish `record` unless it is stored; serving does not need it, so errors are only logged."""
    try:
        if _read_stored(disk) != record:
            disk.publish(SPEC_FILE, [encode_spec(record)])
    except (DiskError, CorruptDataError) as error:
        _log.error("cannot write the cache spec: %s", error.message)


def _read_stored(disk: Disk) -> SpecRecord | None:
    try:
        return read_spec(disk)
    except CorruptDataError as error:
        disk.quarantine(SPEC_FILE, error.message)
        return None
