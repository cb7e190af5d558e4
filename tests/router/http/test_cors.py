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
ASKED_WITH = {"authorization", "content-type", "x-agent-id", "anthropic-version"}


def told(answer):
    return {n: v for n, v in answer.headers.items() if n.startswith("access-control-")}


def page(made):
    http = made.http(KEY, operates=False)
    http.headers["origin"] = PAGE
    return http


async def preflight(http, path, origin=PAGE, method="POST"):
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": ", ".join(sorted(ASKED_WITH)),
        "access-control-request-private-network": "true",
    }
    return await http.options(path, headers=headers)


@pytest.mark.anyio
async def test_nothing_is_said_unless_origins_are_listed():
    async with rig("a") as made:
        http = made.http(operates=False)
        asked = await preflight(http, "/v1/chat/completions")
        same = await http.get("/v1/models", headers={"origin": made.url})

    assert (asked.status_code, same.status_code) == (401, 200)
    assert not told(asked)
    assert not told(same)


@pytest.mark.anyio
async def test_a_listed_page_may_ask_every_route_before_it_shows_a_key():
    async with rig("a", settings=LISTED) as made:
        http = made.http(operates=False)
        for route in made.app.routes:
            path = re.sub(r"\{\w+(:path)?\}", "x", route.path)
            for method in route.methods:
                answer = await preflight(http, path, method=method)
                said = told(answer)
                assert answer.status_code == 200, (method, path)
                assert said["access-control-allow-origin"] == PAGE
                assert method in said["access-control-allow-methods"].split(", ")
                assert set(said["access-control-allow-headers"].split(", ")) >= ASKED_WITH
                assert said["access-control-allow-private-network"] == "true"
                assert "access-control-allow-credentials" not in said
                assert "Origin" in answer.headers["vary"]


@pytest.mark.anyio
async def test_an_unlisted_page_learns_nothing():
    async with rig("a", settings=LISTED) as made:
        http = made.http(operates=False)
        for origin in (OTHER, "null", "http://app.example", f"{PAGE}:444", PAGE + ".evil.example"):
            asked = await preflight(http, "/v1/chat/completions", origin)
            answer = await http.get(
                "/v1/models", headers={"origin": origin, "authorization": f"Bearer {KEY}"}
            )

            assert asked.status_code == 401
            assert answer.status_code == 200, "who has a key may ask; only pages cannot read it"
            assert not told(asked)
            assert not told(answer)


@pytest.mark.anyio
async def test_a_listed_page_reads_answers_errors_and_streams():
    async with rig("a", settings=LISTED) as made:
        http = page(made)
        whole = await made.chat("hello", http=http)
        streamed = await made.chat("hello", http=http, stream=True)
        wrong = await made.chat("hello", http=http, temperature="hot")
        lost = await http.get("/nothing/here")
        strange = await made.http(operates=False).get("/v1/models", headers={"origin": OTHER})
        keyless = await http.get(
            "/v1/models", headers={"origin": PAGE, "authorization": "Bearer wrong-key-of-nobody"}
        )

    answers = (whole, streamed, wrong, lost, keyless)
    assert [a.status_code for a in answers] == [200, 200, 400, 404, 401]
    for answer in answers:
        said = told(answer)
        assert said["access-control-allow-origin"] == PAGE
        assert "x-macfabric-cache" in said["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in said
    assert not told(strange)


@pytest.mark.anyio
async def test_all_headers_of_answers_can_be_read():
    async with rig("a", settings=LISTED) as made:
        answer = await made.chat("hello", http=page(made))
    sent = {name for name in answer.headers if name.startswith("x-")}
    written = set()
    for path in (ROOT / "router").rglob("*.py"):
        written |= set(re.findall(r'"(x-macfabric-[a-z-]+)"', path.read_text()))
    asked = {"x-macfabric-prefetch", "x-macfabric-priority", "x-macfabric-operator-key"}
    asked |= {"x-macfabric-edits", "x-macfabric-truncation"}
    asked |= {"x-macfabric-signing-key", "x-macfabric-signing-salt"}

    assert sent - {"x-accel-buffering"} <= set(EXPOSED)
    assert written - asked <= set(EXPOSED)
