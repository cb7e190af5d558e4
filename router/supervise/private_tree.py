"""Closing to other users what other programs left open."""

import os
import stat
from pathlib import Path


def close_to_others(folder: Path) -> None:
    """Take all rights from group and others below `folder`, and from it; links stay alone."""
    for directory, _, files in os.walk(folder):
        for path in (Path(directory), *(Path(directory, name) for name in files)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                path.chmod(stat.S_IMODE(mode) & stat.S_IRWXU)
