"""Folders that only their owner may read."""

import os
import stat
from pathlib import Path

from router.cli.errors import CommandError


def own_folder(path: Path) -> None:
    """Make a folder, or close an own one to others; raise CommandError for anybody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        message = (
            f"{path} belongs to, or may be written by, other users, who may have put files there: "
            "name another folder, or look at what is in it and `chmod 700` it"
        )
        raise CommandError(message)
    path.chmod(stat.S_IRWXU)
