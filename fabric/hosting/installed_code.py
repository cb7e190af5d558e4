"""Digest of the installed code: an upgrade restarts the processes that run different code."""

from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_KINDS: Final = frozenset({".py", ".js", ".css", ".html"})
DIGEST_BYTES: Final = 8


@cache
def installed_code(package: str, root: Path = _ROOT) -> str:
    """Return a digest of the code of `package` and of `fabric`, as hexadecimal digits.

    Computed once per process, which runs what was installed when it started.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in ("fabric", package):
        for path in sorted((root / name).rglob("*")):
            if path.suffix in _KINDS and path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()
