"""Authentication: tenants and operators by their keys, and local programs without one.

An operator's key opens what concerns all tenants (drains, flushes, metrics, a node's details) and
no tenant's context. One request may carry both keys.

Programs on this machine need no key, if the settings allow it. Web pages in its browsers and
requests through proxies do: a page from another site sends its origin or `Sec-Fetch-Site:
cross-site`, and a page that rebinds DNS to us sends its own host name. A page can still send what
needs neither header, such as a `text/plain` body; that is harmless, so it is accepted like
`curl -d`. Hosts and origins that the operator lists are treated as local.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fabric.errors import FabricError, ForbiddenError, UnauthorizedError
from fabric.hosting.guarded_connection import admit
from fabric.ids import DEFAULT_TENANT, AgentKey, TenantId, parse_agent_id, parse_tenant_id
from fabric.keys import OPERATOR_HEADER, find_key_owner, key_digest
from fabric.settings import RouterSettings
from router.http.forwarded import Forwarding, Principal

_HOST = re.compile(
    r"(?:(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]{1,253}))(?::[0-9]{1,5})?"
)
_ORIGIN_SCHEMES = ("http://", "https://")
_OWN_SITES = frozenset({"same-origin", "none"})
# Headers in which proxies name their client or its request. The list cannot be complete: vendors
# add their own.
_PROXY_HEADER = re.compile(
    r"via|cdn-loop|x-scheme|x-nginx-proxy|(?:.*-)?forwarded(?:-.*)?|(?:x-original|x-envoy)-.*"
    r"|(?:.*-)?(?:client|real|connecting|remote|source|user|socket)-?(?:ip|ipv6|addr|address)"
    r"|(?:cf|fly|fastly|x-vercel|x-arr|x-proxyuser)-.*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LocalPeers:
    """Hosts and origins that count as local, beside requests to a loopback name."""

    hosts: frozenset[str] = frozenset()  # further names of this machine, as containers use
    origins: frozenset[str] = frozenset()  # of pages that may do what local programs may

    def foreign_reason(self, scope: Scope, headers: Headers) -> str | None:
        """Return why a request needs a key, and the setting that changes that, or None."""
        client = scope.get("client") or None
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if client is None or not _is_loopback(client[0]):
            return "it comes from another machine"
        if any(_PROXY_HEADER.fullmatch(name.replace("_", "-")) for name in headers):
            return "it comes through a proxy"
        if len(hosts) != 1 or (host := _host_name(hosts[0].lower())) is None:
            return "its 'Host' header is not a valid host"
        if not self._is_own(host):
            return f"its 'Host' is '{host}': to accept it, {_allow(host)}"
        listed = len(origins) == 1 and origins[0] in self.origins
        if not listed and not all(_is_origin_of(o.lower(), hosts[0].lower()) for o in origins):
            return "it comes from a web page: list the page's origin in router.cors_origins"
        if not listed and not _OWN_SITES.issuperset(headers.getlist("sec-fetch-site")):
            return "it comes from a page of another site"
        return None

    def _is_own(self, host: str) -> bool:
        return host == "localhost" or host in self.hosts or _is_loopback(host)


def _allow(host: str) -> str:
    return f"list it in router.allowed_hosts or start with `macfabric up --allow-host {host}`"


def _host_name(host: str) -> str | None:
    """Return a Host header's name or address, without its port."""
    match = _HOST.fullmatch(host)
    return (match["v4"] or match["v6"] or match["name"]) if match else None


def _is_origin_of(origin: str, host: str) -> bool:
    return any(origin == scheme + host for scheme in _ORIGIN_SCHEMES)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


OPEN_PATHS = frozenset({"/health", "/healthz"})
# Paths that the monitoring key opens, by GET and HEAD.
WATCHED_PATHS = OPEN_PATHS | {"/metrics", "/v1/nodes", "/v1/events", "/v1/router"}
_SCOPE = "macfabric.caller"
WATCHER = "the monitoring key"  # not a valid name in settings
TENANT = "tenant"  # parameter of the query, for operators
ALL_TENANTS = "*"  # a value of it in lists


def principal_of(scope: Scope) -> Principal:
    """Return the authenticated caller of a request's scope."""
    caller: Principal = scope[_SCOPE]
    return caller


def caller_of(request: Request) -> Principal:
    """Return the authenticated caller of a request."""
    return principal_of(request.scope)


def owner_of(scope: Scope) -> str:
    """Return the account that a request's slots and bytes count against."""
    return principal_of(scope).owner


def tenant_of(request: Request) -> TenantId:
    """Return the caller's tenant; raise ForbiddenError if it has none."""
    tenant = caller_of(request).tenant
    if tenant is None:
        message = "this is an operator's key, not a tenant's: send a tenant's API key as well"
        raise ForbiddenError(message, code="tenant_required")
    return tenant


def agent_key(request: Request) -> AgentKey:
    """Return the key of the agent in the path, of the caller's tenant."""
    return tenant_of(request), parse_agent_id(request.path_params["agent"])


def shown_tenant(request: Request) -> TenantId:
    """Return the tenant whose data is shown: the caller's, or for operators the query's."""
    named = request.query_params.get(TENANT)
    if named is None or named == caller_of(request).tenant:
        return tenant_of(request)
    require_operator(request)
    return parse_tenant_id(named)


def shown_agent_key(request: Request) -> AgentKey:
    """Return the key of the agent in the path, of the tenant whose data is shown."""
    return shown_tenant(request), parse_agent_id(request.path_params["agent"])


def require_operator(request: Request) -> None:
    """Raise ForbiddenError unless the caller is an operator."""
    if caller_of(request).operator is None:
        message = (
            "this concerns all tenants, so it takes an operator's key (router.operator_keys): "
            f"send it as '{OPERATOR_HEADER}: KEY'; on the router's own machine, the `macfabric` "
            "command knows one"
        )
        raise ForbiddenError(message, code="operator_required")


class Auth:
    """Middleware that resolves keys to callers, and refuses others before the body is read."""

    def __init__(
        self,
        app: ASGIApp,
        settings: RouterSettings,
        forwarding: Forwarding | None = None,
        watch_key: str | None = None,
    ) -> None:
        """Check the keys of `settings`; with `forwarding`, another router may vouch for callers.

        The `watch_key` opens metrics, nodes and events only.
        """
        self._app = app
        self._forwarding = forwarding
        self._tenants = {name: key_digest(key) for name, key in settings.api_keys.items()}
        self._operators = {name: key_digest(key) for name, key in settings.operator_keys.items()}
        self._watchers = {WATCHER: key_digest(watch_key)} if watch_key else {}
        self._loopback_without_key = settings.loopback_without_key
        self._local = LocalPeers(
            frozenset(settings.allowed_hosts), frozenset(settings.cors_origins)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application with the caller, or raise UnauthorizedError."""
        if scope["type"] == "http":
            try:
                scope[_SCOPE] = caller = self._caller(scope)
                admit(scope, caller.owner)
                _refuse_other_than_watching(scope, caller)
            except UnauthorizedError:
                if scope["path"] not in OPEN_PATHS:
                    raise
                scope[_SCOPE] = Principal()
        elif scope["type"] == "websocket":
            message = "websockets are not supported"
            raise FabricError(message)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Principal:
        headers = Headers(scope=scope)
        if self._forwarding is not None:
            forwarded = self._forwarding.caller(scope, headers)
            if forwarded is not None:
                return forwarded
        sent_key = _given_key(headers)
        if self._is_watcher(sent_key, headers):
            return Principal(None, WATCHER, only_watches=True)
        operator = self._named_operator(headers)
        if sent_key is not None:
            tenant = find_key_owner(sent_key, self._tenants)
            if tenant is not None:
                return Principal(TenantId(tenant), operator)
            given_operator = find_key_owner(sent_key, self._operators)
            # Without configured keys, a key that a client library insists on sending is
            # ignored.
            if given_operator is None and self._tenants:
                raise _unknown()
            operator = operator or given_operator
        why = self._key_reason(scope, headers)
        if why is None:
            return Principal(DEFAULT_TENANT, operator)
        if operator is not None:
            return Principal(None, operator)
        raise _keyless(why, is_any_known=bool(self._tenants))

    def _is_watcher(self, sent_key: bytes | None, headers: Headers) -> bool:
        """Return whether the monitoring key is the only one that a request has."""
        shown = headers.get(OPERATOR_HEADER)
        keys = [key for key in (sent_key, shown.encode() if shown is not None else None) if key]
        return bool(keys) and all(find_key_owner(key, self._watchers) is not None for key in keys)

    def _key_reason(self, scope: Scope, headers: Headers) -> str | None:
        if not self._loopback_without_key:
            return "router.loopback_without_key is off"
        return self._local.foreign_reason(scope, headers)

    def _named_operator(self, headers: Headers) -> str | None:
        key = headers.get(OPERATOR_HEADER)
        if key is None:
            return None
        operator = find_key_owner(key.encode(), self._operators)
        if operator is None:
            raise _unknown("operator")
        return operator


def _refuse_other_than_watching(scope: Scope, caller: Principal) -> None:
    """Raise ForbiddenError if the monitoring key is used for anything else."""
    is_read = scope["method"] in ("GET", "HEAD")
    if caller.only_watches and not (is_read and scope["path"] in WATCHED_PATHS):
        message = (
            "the monitoring key only opens GET /metrics, /v1/nodes, /v1/events and "
            "/v1/router: send a tenant's or an operator's key"
        )
        raise ForbiddenError(message, code="only_watches")


def _unknown(kind: str = "API") -> UnauthorizedError:
    message = f"the {kind} key is not known here"
    return UnauthorizedError(message)


def _keyless(why: str, *, is_any_known: bool) -> UnauthorizedError:
    how = "send an API key: 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    if not is_any_known:
        how += " (none is set here: router.api_keys, or `macfabric up --api-key-file FILE`)"
    message = f"{how}. This request cannot go without one: {why}"
    return UnauthorizedError(message)


def _given_key(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode() if key else None
