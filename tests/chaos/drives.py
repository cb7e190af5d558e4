"""A drive for each node that can be filled: the kernel then refuses writes.

A drive is a file system in memory whose size can be changed while in use. This needs root on
Linux; without it, no drive is filled.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOMY = "8g"  # takes memory only as it is used
ATTEMPTS = 20  # a node may write between measuring the used space and setting the new size
KIB = 1024


class Drives:
    """The mounted drives, by node."""

    def __init__(self, places: dict[str, Path]) -> None:
        self._places = places

    @contextlib.contextmanager
    def filled(self, node: str, left_bytes: int) -> Iterator[None]:
        """Leave a node's drive `left_bytes` of free space, then restore its size."""
        place = self._places[node]
        try:
            for _ in range(ATTEMPTS):
                found = os.statvfs(place)
                used = (found.f_blocks - found.f_bfree) * found.f_frsize
                if _mount("-o", f"remount,size={(used + left_bytes) // KIB + 1}k", str(place)):
                    break
            yield
        finally:
            if not _mount("-o", f"remount,size={ROOMY}", str(place)):
                message = f"the drive of {node} stays full"
                raise RuntimeError(message)


@contextlib.contextmanager
def bounded_drives(nodes: Path, names: Sequence[str]) -> Iterator[Drives | None]:
    """Mount a drive for each node's folder; copy the drives' contents to `kept` at the end."""
    places = {name: nodes / name for name in names}
    mounted = []
    try:
        for place in places.values():
            place.mkdir(parents=True, mode=0o700)
            if _mount("-t", "tmpfs", "-o", f"size={ROOMY},mode=700", "chaos", str(place)):
                mounted.append(place)
        yield Drives(places) if len(mounted) == len(places) else None
    finally:
        for place in mounted:
            with contextlib.suppress(shutil.Error, OSError):
                shutil.copytree(place, nodes.parent / "kept" / place.name, symlinks=True)
            subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)


def _mount(*words: str) -> bool:
    try:
        done = subprocess.run(["mount", *words], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
