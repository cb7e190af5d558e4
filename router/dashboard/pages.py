"""Middleware that answers browsers with the page.

The page has no data of the fabric, so it is served before a key is required: its own requests then
carry the key that was entered. Nor does a standby forward it. Requests of programs for `/`, with
HEAD or without accepting HTML, go to the application.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.dashboard.files import PageFile

_METHODS: Final = frozenset({"GET", "HEAD"})
_HTML: Final = "text/html"


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
