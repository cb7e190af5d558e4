"""Files of the page, read once at start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from router.dashboard.headers import headers_of

FOLDER: Final = Path(__file__).parent / "static"
PREFIX: Final = "/dashboard/"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_TAG_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class PageFile:
    """File with the headers of its answer; `tag` changes with its content."""

    content: bytes = field(repr=False)
    tag: str
    headers: Mapping[str, str]


@cache
def read_files(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Return the files of a folder by the path of their URL; its index is at `/`."""
    files: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            name = path.relative_to(folder).as_posix()
            files["/" if name == INDEX else PREFIX + name] = _read(path)
    return files


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{sha256(content).hexdigest()[:_TAG_DIGITS]}"'
    return PageFile(content, tag, headers_of(TYPES[path.suffix], tag))
