from hashlib import sha256

import pytest

from fabric.errors import UnauthorizedError
from fabric.settings import RouterSettings
from router.http.auth import Auth
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, OPERATOR_KEY, OTHER_KEY, rig

KEYS = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False)
KEYS_OR_LOCAL = RouterSettings(api_keys={"one": KEY})
HASHED = RouterSettings(
    api_keys={"one": f"sha256:{sha256(KEY.encode()).hexdigest().upper()}"},
    operator_keys={"ops": f"sha256:{sha256(OPERATOR_KEY.encode()).hexdigest()}"},
    loopback_without_key=False,
)
OPERATED = RouterSettings(operator_keys={"ops": OPERATOR_KEY})
OPEN = RouterSettings()
DOORS = RouterSettings(
    allowed_hosts=("host.docker.internal",), cors_origins=("https://app.example", "app://notes")
)
CLOSED = RouterSettings(loopback_without_key=False)


def caller(settings, **headers):
    """Return the accepted caller: a tenant, "tenant+operator", "+operator", or None."""
    try:
        accepted = Auth(None, settings)._caller(scope_of(**headers))
    except UnauthorizedError:
        return None
    return (accepted.tenant or "") + (f"+{accepted.operator}" if accepted.operator else "")


def refusal(settings, **headers):
    with pytest.raises(UnauthorizedError) as refused:
        Auth(None, settings)._caller(scope_of(**headers))
    return refused.value.message


def scope_of(peer="127.0.0.1", host="localhost:8000", more=(), **header_fields):
    named = [(name.replace("_", "-"), value) for name, value in header_fields.items()]
    listed = [*([("host", host)] if host else []), *named, *more]
    raw = [(name.encode(), value.encode()) for name, value in listed]
    return {"type": "http", "path": "/v1/models", "client": (peer, 5), "headers": raw}


CASES = [
    (KEYS, {"authorization": f"Bearer {KEY}"}, "one"),
    (KEYS, {"authorization": f"bearer {OTHER_KEY}"}, "two"),
    (KEYS, {"x_api_key": KEY}, "one"),
    (KEYS, {"peer": "10.0.0.9", "authorization": f"Bearer {KEY}"}, "one"),
    (KEYS, {}, None),
    (KEYS, {"authorization": "Bearer wrong"}, None),
    (KEYS, {"authorization": f"Basic {KEY}"}, None),
    (KEYS, {"authorization": "Bearer "}, None),
    (KEYS, {"authorization": f"Bearer {KEY}x"}, None),
    (KEYS, {"authorization": "Bearer kéy-öf-tenant-one"}, None),
    (KEYS_OR_LOCAL, {}, "default"),
    (KEYS_OR_LOCAL, {"peer": "::1"}, "default"),
    (KEYS_OR_LOCAL, {"peer": "::ffff:127.0.0.1"}, "default"),
    (KEYS_OR_LOCAL, {"authorization": f"Bearer {KEY}"}, "one"),
    (KEYS_OR_LOCAL, {"authorization": "Bearer wrong"}, None),
    (KEYS_OR_LOCAL, {"peer": "10.0.0.9"}, None),
    (OPEN, {}, "default"),
    (OPEN, {"authorization": "Bearer anything"}, "default"),
    (OPEN, {"peer": "192.168.1.7", "authorization": "Bearer anything"}, None),
    (OPEN, {"peer": "testclient"}, None),
    (OPEN, {"host": "evil.example"}, None),
    (OPEN, {"host": "127.0.0.1:8000"}, "default"),
    (OPEN, {"host": "[::1]:8000"}, "default"),
    (OPEN, {"origin": "https://evil.example"}, None),
    (OPEN, {"origin": "null"}, None),
    (OPEN, {"origin": "http://localhost:8000"}, "default"),
    (OPEN, {"origin": "http://LOCALHOST:8000"}, "default"),
    (OPEN, {"origin": "http://localhost:9000"}, None),
    (OPEN, {"origin": "http://127.0.0.1:8000"}, None),
    (OPEN, {"origin": "http://["}, None),
    (OPEN, {"origin": ""}, None),
    (OPEN, {"host": "["}, None),
    (OPEN, {"host": "[::1"}, None),
    (OPEN, {"host": "evil.example@localhost"}, None),
    (OPEN, {"host": "localhost:8000/x"}, None),
    (OPEN, {"host": "localhost\n"}, None),
    (OPEN, {"host": ""}, None),
    (OPEN, {"more": [("host", "evil.example")]}, None),
    (OPEN, {"sec_fetch_site": "cross-site"}, None),
    (OPEN, {"sec_fetch_site": "same-site"}, None),
    (OPEN, {"sec_fetch_site": "same-origin"}, "default"),
    (OPEN, {"sec_fetch_site": "none"}, "default"),
    (OPEN, {"forwarded": "for=127.0.0.1"}, None),
    (OPEN, {"via": "1.1 proxy"}, None),
    (OPEN, {"x_real_ip": "127.0.0.1"}, None),
    (OPEN, {"x_forwarded_for": "127.0.0.1"}, None),
    (KEYS, {"sec_fetch_site": "cross-site", "x_api_key": KEY}, "one"),
    (HASHED, {"authorization": f"Bearer {KEY}"}, "one"),
    (HASHED, {"authorization": f"Bearer sha256:{sha256(KEY.encode()).hexdigest()}"}, None),
    (HASHED, {"authorization": f"Bearer {OPERATOR_KEY}"}, "+ops"),
    (HASHED, {"x_api_key": KEY, "x_macfabric_operator_key": OPERATOR_KEY}, "one+ops"),
    (HASHED, {"x_macfabric_operator_key": OPERATOR_KEY}, "+ops"),
    (HASHED, {"x_api_key": KEY, "x_macfabric_operator_key": KEY}, None),
    (OPERATED, {}, "default"),
    (OPERATED, {"authorization": "Bearer anything"}, "default"),
    (OPERATED, {"authorization": f"Bearer {OPERATOR_KEY}"}, "default+ops"),
    (OPERATED, {"peer": "10.0.0.9", "authorization": f"Bearer {OPERATOR_KEY}"}, "+ops"),
    (OPERATED, {"x_macfabric_operator_key": "wrong-operator-key"}, None),
    (CLOSED, {}, None),
    (CLOSED, {"authorization": "Bearer anything"}, None),
    (OPEN, {"host": "host.docker.internal:8000"}, None),
    (DOORS, {"host": "host.docker.internal:8000", "x_api_key": "sk-anything"}, "default"),
    (DOORS, {"host": "HOST.docker.internal"}, "default"),
    (DOORS, {"host": "host.docker.internal", "peer": "172.17.0.2"}, None),
    (DOORS, {"host": "host.docker.internal.evil.example"}, None),
    (DOORS, {"host": "x.host.docker.internal"}, None),
    (DOORS, {"host": "host.docker.internal", "x_forwarded_for": "10.0.0.1"}, None),
    (DOORS, {"origin": "https://app.example", "sec_fetch_site": "cross-site"}, "default"),
    (DOORS, {"origin": "app://notes"}, "default"),
    (DOORS, {"origin": "https://app.example", "peer": "10.0.0.9"}, None),
    (DOORS, {"origin": "https://app.example", "host": "evil.example"}, None),
    (DOORS, {"origin": "http://app.example"}, None),
    (DOORS, {"origin": "https://app.example:8443"}, None),
    (DOORS, {"origin": "https://app.example.evil.example"}, None),
    (DOORS, {"origin": "null"}, None),
    (DOORS, {"origin": "https://app.example", "more": [("origin", "https://evil.ex")]}, None),
    (DOORS, {"sec_fetch_site": "cross-site"}, None),
]


@pytest.mark.parametrize(("settings", "headers", "expected"), CASES)
def test_request_is_authenticated_or_rejected(settings, headers, expected):
    assert caller(settings, **headers) == expected


@pytest.mark.parametrize(
    ("settings", "headers", "hint"),
    [
        (OPEN, {"host": "host.docker.internal:8000"}, "--allow-host host.docker.internal"),
        (OPEN, {"host": "host.docker.internal:8000"}, "router.allowed_hosts"),
        (OPEN, {"host": "host.docker.internal:8000"}, "--api-key-file"),
        (OPEN, {"origin": "https://app.example"}, "router.cors_origins"),
        (OPEN, {"peer": "10.0.0.9"}, "another machine"),
        (OPEN, {"via": "1.1 proxy"}, "a proxy"),
        (CLOSED, {}, "router.loopback_without_key"),
    ],
)
def test_refusal_names_setting_that_would_allow_it(settings, headers, hint):
    assert hint in refusal(settings, **headers)


@pytest.mark.parametrize(
    "name",
    [
        *("CF-Connecting-IP", "CF-Ray", "True-Client-IP", "X-Client-IP", "X-Cluster-Client-IP"),
        *("X-Forwarded", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Server"),
        *(
            "X-Original-Forwarded-For",
            "X-Original-URL",
            "X-Original-Host",
            "X-Envoy-External-Address",
        ),
        *("Fastly-Client-IP", "Fly-Client-IP", "X-Azure-ClientIP", "X-Appengine-User-IP"),
        *(
            "X-Remote-Addr",
            "X-ProxyUser-IP",
            "Client-IP",
            "X-Scheme",
            "CDN-Loop",
            "WL-Proxy-Client-IP",
        ),
    ],
)
def test_proxy_is_detected_by_any_proxy_header(name):
    assert caller(OPEN, **{name.replace("-", "_"): "127.0.0.1"}) is None


@pytest.mark.parametrize(
    "name",
    [
        *("X-Client-Request-Id", "X-Stainless-Lang", "X-App", "X-Agent-ID", "User-Agent"),
        *("X-Forward-Thinking", "Anthropic-Dangerous-Direct-Browser-Access", "X-Session-Id"),
        *("OpenAI-Organization", "Originator", "Traceparent", "X-Title", "HTTP-Referer"),
    ],
)
def test_client_headers_are_not_taken_for_a_proxy(name):
    assert caller(OPEN, **{name.replace("-", "_"): "1"}) == "default"


def test_refusal_omits_key_hint_when_keys_are_set():
    assert "--api-key-file" not in refusal(KEYS, host="host.docker.internal")


@pytest.mark.anyio
async def test_every_route_except_health_requires_a_key():
    async with rig("a", settings=KEYS, tended=False) as fabric:
        http = fabric.http(operates=False)
        checked = 0
        for route in fabric.app.routes:
            path = route.path.replace("{model:path}", MODEL)
            path = path.replace("{agent}", "x").replace("{node}", "node-a")
            for method in sorted(route.methods):
                answer = await http.request(method, path)
                checked += 1
                if path in ("/health", "/healthz"):
                    assert answer.status_code == 200, (method, path)
                else:
                    assert answer.status_code == 401, (method, path)
                    if method != "HEAD":
                        error = answer.json()["error"]
                        by_code = error.get("code") == "invalid_api_key"
                        assert by_code or error["type"] == "authentication_error", path
        unknown = await http.get("/nothing/here")

    assert checked >= 10
    assert unknown.status_code == 401
    assert not fabric["node-a"].requests


@pytest.mark.anyio
async def test_keys_map_to_isolated_tenants():
    async with rig("a", settings=KEYS) as fabric:
        one, two = fabric.http(KEY), fabric.http(OTHER_KEY)
        first = await fabric.chat("x" * 2000, agent="alice", http=one)
        second = await fabric.chat("x" * 2000, agent="alice", http=two)
        third = await fabric.chat("x" * 2000, http=two)
        listed = (await one.get("/v1/agents")).json()["data"]
        gone = await two.delete("/v1/agents/alice")
        kept = await one.get("/v1/agents/alice")
        hidden = await two.get("/v1/agents/alice")

    assert first.status_code == second.status_code == 200
    assert second.headers["x-macfabric-cached-tokens"] == "0"
    assert third.headers["x-macfabric-cached-tokens"] != "0", "its own memory is found"
    assert [agent["id"] for agent in listed] == ["alice"]
    assert {request.tenant for request in fabric["node-a"].requests} == {"one", "two"}
    assert gone.status_code == 200
    assert kept.status_code == 200
    assert hidden.status_code == 404
