"""CORS for web pages of listed origins; nothing changes for all others.

Keys travel in headers that a page sets itself, so no credentials of a browser are ever allowed.
"""

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.limits import PREFLIGHT_CACHE_S

METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
# Headers that a page's script may read, besides the body.
EXPOSED: Final = (
    "retry-after",
    "request-id",
    "x-request-id",
    "x-macfabric-agent",
    "x-macfabric-amortized-tokens",
    "x-macfabric-cache",
    "x-macfabric-cached-tokens",
    "x-macfabric-epoch",
    "x-macfabric-ignored",
    "x-macfabric-match",
    "x-macfabric-match-reason",
    "x-macfabric-node",
    "x-macfabric-policies",
    "x-macfabric-revision",
    "x-macfabric-template",
)


class Cors:
    """Middleware that answers preflight requests before authentication: they carry no key."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._listed = CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_CACHE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application; add CORS headers for a listed origin."""
        listed = scope["type"] == "http" and Headers(scope=scope).get("origin") in self._origins
        await (self._listed if listed else self._app)(scope, receive, send)
