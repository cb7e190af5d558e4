"""Requests of programs on this machine, as opposed to web pages in its browsers and proxies.

A page elsewhere sends its origin, or its browser says `Sec-Fetch-Site: cross-site`; one that
rebinds DNS to us sends its own host. What any other page can send without these, a body of
`text/plain` say, is no danger by itself, so it is taken as `curl -d` sends it. Names and origins
that the operator lists are let in like this machine's own.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

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

    def why_foreign(self, scope: Scope, headers: Headers) -> str | None:
        """Return why a request needs a key, and the setting that changes that, or None."""
        client = scope.get("client") or None
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if client is None or not _is_loopback(client[0]):
            return "it comes from another machine"
        if any(_PROXY_HEADER.fullmatch(name.replace("_", "-")) for name in headers):
            return "it comes through a proxy"
        if len(hosts) != 1 or (host := _named(hosts[0].lower())) is None:
            return "its 'Host' header is no host"
        if not self._is_own(host):
            return f"its 'Host' is '{host}': to let it in, {_allow(host)}"
        listed = len(origins) == 1 and origins[0] in self.origins
        if not listed and not all(_is_origin_of(o.lower(), hosts[0].lower()) for o in origins):
            return "a web page asks: to let pages in, list their origin in router.cors_origins"
        if not listed and not _OWN_SITES.issuperset(headers.getlist("sec-fetch-site")):
            return "a page of another site asks"
        return None

    def _is_own(self, host: str) -> bool:
        return host == "localhost" or host in self.hosts or _is_loopback(host)


def _allow(host: str) -> str:
    return f"list it in router.allowed_hosts or start with `macfabric up --allow-host {host}`"


def _named(host: str) -> str | None:
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
