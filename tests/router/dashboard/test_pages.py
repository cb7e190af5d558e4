"""Browsers get the page with its headers; programs still get the earlier answers."""

import re

import pytest

from fabric.settings import RouterSettings
from router.dashboard.pages import FOLDER, PREFIX, read_files
from tests.router.rig import KEY, rig
from tests.support.vendored import wrong_files

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEYED = RouterSettings(api_keys={"one": KEY}, loopback_without_key=False, takeover_after_s=20.0)
IMPORT = re.compile(r'(?:from|import)\s*\(?"(\.[^"]+)"')
LINKED = re.compile(r'(?:href|src)="(/dashboard/[^"]+)"')
OUTSIDE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/(?:2000/svg|1999))[a-z0-9]", re.IGNORECASE)


@pytest.fixture
async def http():
    async with rig("a", settings=KEYED) as fabric:
        yield fabric.http(operates=False)


@pytest.mark.anyio
async def test_browser_gets_page_without_key(http):
    answer = await http.get("/", headers=BROWSER)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module" src="/dashboard/app.js">' in answer.text
    script = await http.get("/dashboard/app.js")
    head = await http.head("/dashboard/app.js")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(script.content))


@pytest.mark.anyio
@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/htmlx"])
async def test_program_keeps_its_answer_at_root(accept):
    async with rig("a") as fabric:
        http = fabric.http(operates=False)
        head = await http.head("/", headers={"accept": accept})
        got = await http.get("/", headers={"accept": accept})

    assert (head.status_code, got.status_code) == (200, 405)
    assert got.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.anyio
async def test_data_still_needs_key(http):
    for path in ("/v1/events", "/v1/nodes", "/v1/agents", "/dashboard/", "/dashboard/absent.js"):
        answer = await http.get(path, headers=BROWSER)
        assert answer.status_code == 401, path
    assert (await http.post("/", headers=BROWSER)).status_code == 401


@pytest.mark.anyio
async def test_every_file_is_safe_to_show(http):
    for path in read_files():
        answer = await http.get(path, headers=BROWSER)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200, path
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';"), path
        assert "frame-ancestors 'none'" in policy
        assert "base-uri 'none'" in policy
        assert "form-action 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in answer.headers


@pytest.mark.anyio
async def test_unchanged_file_is_not_sent_again(http):
    first = await http.get(f"{PREFIX}app.js")
    again = await http.get(f"{PREFIX}app.js", headers={"if-none-match": first.headers["etag"]})
    other = await http.get(f"{PREFIX}app.js", headers={"if-none-match": '"another"'})

    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert other.content == first.content


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/dashboard/../__init__.py", "/dashboard/%2e%2e/files.py"])
async def test_only_listed_files_are_served(http, path):
    assert (await http.get(path, headers=BROWSER)).status_code == 401


def own_texts():
    files = [p for p in FOLDER.rglob("*") if p.suffix in {".html", ".css", ".js", ".svg"}]
    return {p: p.read_text() for p in files if "vendor" not in p.parts}


def test_page_has_no_inline_script_or_style():
    page = (FOLDER / "index.html").read_text()

    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []


def test_page_never_sets_html():
    dangerous = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet")

    assert [p.name for p, text in own_texts().items() if dangerous.search(text)] == []


def test_page_links_to_no_other_site():
    found = {p.name: OUTSIDE.findall(text) for p, text in own_texts().items()}

    assert {name: hits for name, hits in found.items() if hits} == {}


def test_every_linked_or_imported_file_exists():
    files = read_files()
    missing = []
    for path, text in own_texts().items():
        linked = LINKED.findall(text)
        here = PREFIX + path.relative_to(FOLDER).parent.as_posix().removeprefix(".")
        for name in IMPORT.findall(text):
            parts = [*here.strip("/").split("/"), *name.split("/")]
            whole = []
            for part in parts:
                if part == "..":
                    whole.pop()
                elif part not in ("", "."):
                    whole.append(part)
            linked.append("/" + "/".join(whole))
        missing += [(path.name, name) for name in linked if name not in files]

    assert missing == []


def test_libraries_are_as_published():
    assert wrong_files() == []
