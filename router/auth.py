"""Who may ask: every route but the health check needs a key, or a local peer where allowed."""

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fabric.errors import FabricError, UnauthorizedError
from fabric.ids import DEFAULT_TENANT, TenantId
from fabric.settings import RouterSettings

OPEN_PATHS = frozenset({"/healthz"})
_TENANT_SCOPE = "macfabric.tenant"
_LOCAL_NAME = "localhost"


def tenant_of(request: Request) -> TenantId:
    """Return the tenant that the request was let in for."""
    return TenantId(request.scope[_TENANT_SCOPE])


class Auth:
    """Turns keys into tenants and refuses everybody else before anything is read."""

    def __init__(self, app: ASGIApp, settings: RouterSettings) -> None:
        self._app = app
        self._keys = {TenantId(tenant): key.encode() for tenant, key in settings.api_keys.items()}
        self._loopback_without_key = settings.loopback_without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in with its tenant, or raise UnauthorizedError."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scope[_TENANT_SCOPE] = self._tenant(scope)
        elif scope["type"] == "websocket":
            message = "there are no websockets here"
            raise FabricError(message)
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> TenantId:
        headers = Headers(scope=scope)
        given = _given_key(headers)
        if given is not None and self._keys:
            return self._tenant_of(given)
        # Where no key is configured, one that a client library insists on sending means nothing.
        if self._loopback_without_key and _is_local(scope, headers):
            return DEFAULT_TENANT
        message = "send an API key: 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise UnauthorizedError(message)

    def _tenant_of(self, given: bytes) -> TenantId:
        found = None
        for tenant, key in self._keys.items():  # all of them, to take the same time always
            if hmac.compare_digest(given, key):
                found = tenant
        if found is None:
            message = "the API key is not known here"
            raise UnauthorizedError(message)
        return found


def _given_key(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode() if key else None


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Say whether a program on this machine asks, and not a web page through its browser."""
    client = scope.get("client")
    if not client or not _is_loopback(client[0]):
        return False
    host = urlsplit(f"//{headers.get('host', '')}").hostname
    origin = headers.get("origin")
    # A page elsewhere sends its own origin; one that rebinds DNS to us sends its own host.
    return _is_local_name(host) and (origin is None or _is_local_name(urlsplit(origin).hostname))


def _is_local_name(name: str | None) -> bool:
    return name == _LOCAL_NAME or _is_loopback(name or "")


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
