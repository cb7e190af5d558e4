"""Folders of keys as `macfabric up` creates them."""

from datetime import UTC, datetime
from pathlib import Path

from fabric.keys import CLUSTER_KEY
from router.cli.keys import KeyFolder
from router.private_files import write_private
from router.tls.authority import Subject
from router.tls.machine_hosts import machine_hosts


def make_keys(folder: Path, cluster_key: bytes | None = None) -> KeyFolder:
    """Create the keys of a fabric on this machine, optionally with a given cluster key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cluster_key is not None:
        write_private(folder / CLUSTER_KEY, cluster_key.hex())
    keys = KeyFolder.in_data(folder)
    keys.create(Subject.of(machine_hosts()), datetime.now(UTC))
    return keys
