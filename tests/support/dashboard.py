"""Actions on the dashboard's page, and checks of its appearance."""

import json
import os
from pathlib import Path

from tests.support.browser import Browser

VIEWS = ("fleet", "agents", "charts", "decisions", "scenarios", "events")
SIZES = {"360": (360, 800), "1280": (1280, 800), "4k": (3840, 2160)}
PICTURES = "MACFABRIC_TESTS_PICTURES"  # a folder for screenshots to look at
_AXE = Path(__file__).parents[1] / "e2e" / "vendor" / "axe.min.js"
_TITLES = {view: view.capitalize() for view in VIEWS}


def sign_in(page: Browser, url: str, key: str = "", operator_key: str = "") -> None:
    """Open the page of a router that requires a key, and enter the keys."""
    page.open(url + "/")
    page.wait_text("only with a key")
    if key:
        page.type(key, "input[type=password]")
    if operator_key:
        page.type(operator_key, "label:nth-of-type(2) input")
    page.click("Sign in", "main button")


def go(page: Browser, place: str) -> None:
    """Open a view by its address."""
    page.run(f"location.hash = {json.dumps('#/' + place)}")


def show(page: Browser, view: str) -> None:
    """Open a view, and wait until it is rendered."""
    go(page, view)
    title = _TITLES.get(view, "Last turns")
    page.wait(
        f"[...document.querySelectorAll('h1, h3')].some((h) => h.textContent.startsWith('{title}'))"
    )
    page.wait("!document.body.innerText.includes('Reading …')")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def violations(page: Browser) -> list[str]:
    """Return axe's violations of WCAG 2.2 A and AA and of its best practices on the page."""
    if not page.run("Boolean(window.axe)"):
        page.run(_AXE.read_text() + "; true")
    results = page.run("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in results["violations"]
        for node in each["nodes"]
    ]


def overflow(page: Browser) -> list[str]:
    """Return the elements that make the page wider than the window."""
    return list(
        page.run(
            "document.documentElement.scrollWidth <= innerWidth ? [] :"
            " [...document.querySelectorAll('main *')].filter((e) =>"
            " e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll'))"
            ".map((e) => e.outerHTML.slice(0, 120))"
        )
    )


def picture(page: Browser, name: str, folder: Path | None = None) -> None:
    """Save a screenshot in the folder named by the environment, or else in `folder`."""
    chosen = os.environ.get(PICTURES) or folder
    if chosen:
        page.screenshot(Path(chosen) / f"{name}.png")
