"""Web pages: none may read anything unless its origin is listed; then every route and header."""

import re
from pathlib import Path

import pytest

from fabric.settings import RouterSettings
from router.http.cors import EXPOSED
from tests.router.rig import KEY, rig

ROOT = Path(__file__).resolve().parents[3]
PAGE, OTHER = "https://app.example", "https://evil.example"
LISTED = RouterSettings(api_keys={"one": KEY}, cors_origins=(PAGE,), takeover_after_s=20.0)
REQUEST_HEADERS = {"authorization", "content-type", "x-agent-id", "anthropic-version"}


def cors_headers(answer):
    return {n: v for n, v in answer.headers.items() if n.startswith("access-control-")}


def page(fabric):
    http = fabric.http(KEY, operates=False)
    http.headers["origin"] = PAGE
    return http


async def preflight(http, path, origin=PAGE, method="POST"):
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": ", ".join(sorted(REQUEST_HEADERS)),
        "access-control-request-private-network": "true",
    }
    return await http.options(path, headers=headers)


@pytest.mark.anyio
async def test_cors_headers_are_absent_unless_origins_are_listed():
    async with rig("a") as fabric:
        http = fabric.http(operates=False)
        preflighted = await preflight(http, "/v1/chat/completions")
        same = await http.get("/v1/models", headers={"origin": fabric.url})

    assert (preflighted.status_code, same.status_code) == (401, 200)
    assert not cors_headers(preflighted)
    assert not cors_headers(same)


@pytest.mark.anyio
async def test_listed_origin_may_preflight_every_route_without_key():
    async with rig("a", settings=LISTED) as fabric:
        http = fabric.http(operates=False)
        for route in fabric.app.routes:
            path = re.sub(r"\{\w+(:path)?\}", "x", route.path)
            for method in route.methods:
                answer = await preflight(http, path, method=method)
                allowed = cors_headers(answer)
                assert answer.status_code == 200, (method, path)
                assert allowed["access-control-allow-origin"] == PAGE
                assert method in allowed["access-control-allow-methods"].split(", ")
                assert set(allowed["access-control-allow-headers"].split(", ")) >= REQUEST_HEADERS
                assert allowed["access-control-allow-private-network"] == "true"
                assert "access-control-allow-credentials" not in allowed
                assert "Origin" in answer.headers["vary"]


@pytest.mark.anyio
async def test_unlisted_origin_gets_no_cors_headers():
    async with rig("a", settings=LISTED) as fabric:
        http = fabric.http(operates=False)
        for origin in (OTHER, "null", "http://app.example", f"{PAGE}:444", PAGE + ".evil.example"):
            preflighted = await preflight(http, "/v1/chat/completions", origin)
            answer = await http.get(
                "/v1/models", headers={"origin": origin, "authorization": f"Bearer {KEY}"}
            )

            assert preflighted.status_code == 401
            assert answer.status_code == 200, "a valid key; only pages cannot read the answer"
            assert not cors_headers(preflighted)
            assert not cors_headers(answer)


@pytest.mark.anyio
async def test_listed_origin_reads_responses_errors_and_streams():
    async with rig("a", settings=LISTED) as fabric:
        http = page(fabric)
        whole = await fabric.chat("hello", http=http)
        streamed = await fabric.chat("hello", http=http, stream=True)
        wrong = await fabric.chat("hello", http=http, temperature="hot")
        lost = await http.get("/nothing/here")
        strange = await fabric.http(operates=False).get("/v1/models", headers={"origin": OTHER})
        keyless = await http.get(
            "/v1/models", headers={"origin": PAGE, "authorization": "Bearer wrong-key-of-nobody"}
        )

    answers = (whole, streamed, wrong, lost, keyless)
    assert [a.status_code for a in answers] == [200, 200, 400, 404, 401]
    for answer in answers:
        allowed = cors_headers(answer)
        assert allowed["access-control-allow-origin"] == PAGE
        assert "x-macfabric-cache" in allowed["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in allowed
    assert not cors_headers(strange)


@pytest.mark.anyio
async def test_all_response_headers_are_exposed():
    async with rig("a", settings=LISTED) as fabric:
        answer = await fabric.chat("hello", http=page(fabric))
    sent = {name for name in answer.headers if name.startswith("x-")}
    written = set()
    for path in (ROOT / "router").rglob("*.py"):
        written |= set(re.findall(r'"(x-macfabric-[a-z-]+)"', path.read_text()))
    request_headers = {"x-macfabric-prefetch", "x-macfabric-priority", "x-macfabric-operator-key"}
    request_headers |= {"x-macfabric-edits", "x-macfabric-truncation"}
    request_headers |= {"x-macfabric-caller", "x-macfabric-caller-proof", "x-macfabric-standby"}
    request_headers |= {"x-macfabric-signing-key", "x-macfabric-signing-salt"}

    assert sent - {"x-accel-buffering"} <= set(EXPOSED)
    assert written - request_headers <= set(EXPOSED)
