"""Files of the dashboard, read once at start, and the middleware that answers browsers with them.

The page has no data of the fabric, so it is served before a key is required: its own requests then
carry the key that was entered. Nor does a standby forward it. Requests of programs for `/`, with
HEAD or without accepting HTML, go to the application.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

# Scripts and styles are files of this server, never part of the page, which uses no other server.
# With `require-trusted-types-for`, browsers refuse to parse any text as HTML.
_CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFETY: Final = {
    "content-security-policy": _CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
FOLDER: Final = Path(__file__).parent / "static"
PREFIX: Final = "/dashboard/"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_TAG_DIGITS: Final = 32
_METHODS: Final = frozenset({"GET", "HEAD"})
_HTML: Final = "text/html"


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
        if path.is_file() and path.suffix in _TYPES:
            name = path.relative_to(folder).as_posix()
            files["/" if name == _INDEX else PREFIX + name] = _read(path)
    return files


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{sha256(content).hexdigest()[:_TAG_DIGITS]}"'
    return PageFile(content, tag, _headers(_TYPES[path.suffix], tag))


def _headers(media_type: str, tag: str) -> dict[str, str]:
    """Return the headers of a file: browsers check each time whether it has changed."""
    return {
        **_SAFETY,
        "content-type": media_type,
        "cache-control": "no-cache",
        "etag": tag,
        "vary": "accept",  # `/` answers programs otherwise
    }


class Pages:
    """Middleware that serves the dashboard's files, and passes all other requests on."""

    def __init__(self, app: ASGIApp, files: Mapping[str, PageFile]) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a file, or run the inner application."""
        found = self._find(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        await _answer(found, Headers(scope=scope))(scope, receive, send)

    def _find(self, scope: Scope) -> PageFile | None:
        if scope["type"] != "http" or scope["method"] not in _METHODS:
            return None
        path = scope["path"]
        if path == "/" and not _is_of_browser(scope):
            return None
        return self._files.get(path)


def _is_of_browser(scope: Scope) -> bool:
    """Return whether a client asks for HTML by name; coding agents probe with HEAD or `*/*`."""
    names = ",".join(Headers(scope=scope).getlist("accept")).split(",")
    types = {name.partition(";")[0].strip().lower() for name in names}
    return scope["method"] == "GET" and _HTML in types


def _answer(file: PageFile, headers: Headers) -> Response:
    """Return the file, or 304 to a browser that has it."""
    known = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
    if file.tag in known:
        kept = {name: value for name, value in file.headers.items() if name != "content-type"}
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=kept)
    return Response(file.content, headers=dict(file.headers))
