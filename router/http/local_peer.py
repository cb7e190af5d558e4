"""Whether a program on this machine asks: not a web page through its browser, nor a proxy.

A page elsewhere sends its origin, or its browser says `Sec-Fetch-Site: cross-site`; one that
rebinds DNS to us sends its own host. What any other page can send without these, a body of
`text/plain` say, is no danger by itself, so it is taken as `curl -d` sends it.
"""

import re
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

_HOST = re.compile(r"(?:localhost|(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-f:.]+)\])(?::[0-9]{1,5})?")
_ORIGIN_SCHEMES = ("http://", "https://")
_OWN_SITES = frozenset({"same-origin", "none"})
# Whoever speaks for somebody else says so in one of these.
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def is_local(scope: Scope, headers: Headers) -> bool:
    """Say whether the request may go without a key where programs of this machine may."""
    client = scope.get("client") or None
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    return (
        client is not None
        and _is_loopback(client[0])
        and not any(name in headers for name in _PROXY_HEADERS)
        and len(hosts) == 1
        and _is_local_host(hosts[0].lower())
        and all(_is_origin_of(origin.lower(), hosts[0].lower()) for origin in origins)
        and _OWN_SITES.issuperset(headers.getlist("sec-fetch-site"))
    )


def _is_local_host(host: str) -> bool:
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    address = found["v4"] or found["v6"]
    return address is None or _is_loopback(address)


def _is_origin_of(origin: str, host: str) -> bool:
    return any(origin == scheme + host for scheme in _ORIGIN_SCHEMES)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
