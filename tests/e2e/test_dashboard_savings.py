"""The dashboard's first conversation, and its table of savings by reuse."""

import json
from pathlib import Path

import pytest

from tests.support.browser import browser
from tests.support.local_fabric import LocalFabric
from tests.support.tiny_models import ONE_LAYER, write_model

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("savings")
    instance = LocalFabric(folder, str(write_model(folder / "model", ONE_LAYER)), ["node-a"])
    yield instance
    instance.stop()


def violations(page):
    if not page.run("Boolean(window.axe)"):
        page.run(AXE + "; true")
    found = page.run("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found]


def test_second_message_reuses_the_first_and_charts_show_the_savings(fabric, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.resize(1280, 800)
        page.open(fabric.url + "/")
        page.wait_text("Try it")
        assert violations(page) == []
        for answers in (1, 2):
            page.run(
                "(() => { const area = document.querySelector('textarea');"
                f"area.value = {json.dumps(TEXT)};"
                "area.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
            page.click("Send", "button")
            page.wait(f"document.querySelectorAll('ol.try > li').length === {answers}")
        reused = page.run(
            "[...document.querySelectorAll('ol.try .muted')].map((p) => p.textContent)"
        )
        page.run("location.hash = '#/charts'")
        page.wait_text("Saved by reuse")
        page.wait("document.querySelectorAll('section tbody tr').length === 1")
        row = page.run("[...document.querySelectorAll('section td')].map((td) => td.textContent)")
        assert violations(page) == []
        page.resize(360, 800)
        page.wait("document.documentElement.scrollWidth <= 360")
        assert page.faults == []

    assert " 0 of " in reused[0]
    assert " 0 of " not in reused[1]
    (usage,) = fabric.http.get("/v1/usage").json()["data"]
    assert row[1:3] == ["default", "2"]
    assert row[4].strip().startswith(f"{usage['cached_tokens']:,} (")
    assert usage["cached_tokens"] > 0
