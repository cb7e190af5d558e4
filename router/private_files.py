"""Files that only their owner may read, such as keys, certificates, rosters and logs."""

import os
import stat
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)


def close_to_others(folder: Path) -> None:
    """Remove all rights of group and others from `folder` and its content, except links."""
    for directory, _, files in os.walk(folder):
        for path in (Path(directory), *(Path(directory, name) for name in files)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                path.chmod(stat.S_IMODE(mode) & stat.S_IRWXU)
