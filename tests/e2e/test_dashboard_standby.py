"""The dashboard of a standby router shows its role, and acts through the active router."""

import signal

import httpx2
import pytest

from tests.support.browser import browser
from tests.support.dashboard import overflow, picture
from tests.support.standby_fabric import (
    HANG_S,
    HEADERS,
    NODES,
    ask,
    body,
    two_routers,
    until_role,
)

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


def owner_of(router, agent):
    answer = httpx2.get(f"{router.url}/v1/agents/{agent}", headers=HEADERS, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["owner"]


def talk(router, agent):
    answer = httpx2.post(
        f"{router.url}/v1/chat/completions",
        json=body("the cat sat on the mat. " * 20, max_tokens=4),
        headers=HEADERS | {"x-agent-id": agent},
        timeout=HANG_S,
    )
    assert answer.status_code == 200, answer.text


def test_page_of_standby_names_the_active_router_and_acts_through_it(tmp_path):
    with two_routers(tmp_path) as (_, one, two), browser(tmp_path / "profile") as page:
        page.resize(1280, 800)
        talk(one, "mira")
        source = owner_of(one, "mira")
        target = next(name for name in NODES if name != source)
        page.open(two.url + "/#/agents")
        page.wait_text("This is the standby router.")
        assert page.run("document.querySelector('.notice a').href") == f"{one.url}/"
        page.click("mira")
        page.click("Move …")
        page.wait("document.querySelector('dialog select')")
        page.choose(target, "dialog select")
        page.click("Move", "dialog button")
        page.wait_text(f"mira moved to {target} in")
        picture(page, "standby")
        assert owner_of(one, "mira") == target
        talk(one, "seen-through-the-standby")
        page.wait_text("seen-through-the-standby")

        one.send(signal.SIGKILL)
        until_role(two, "active")
        page.wait("!document.body.innerText.includes('This is the standby router.')")
        page.wait("document.querySelector('.live').textContent === 'live'")
        until_served(two)
        talk(two, "after-the-takeover")
        page.wait_text("after-the-takeover")
        assert page.faults == []


def until_served(router):
    """Wait until the router that took over serves a turn."""
    for _ in range(int(HANG_S)):
        if ask(router, "hello").status_code == 200:
            return
    pytest.fail("no turn was served after the takeover")


def test_page_of_router_that_lost_its_term_follows_the_active_one(tmp_path):
    with two_routers(tmp_path) as (_, one, two), browser(tmp_path / "profile") as page:
        page.resize(360, 800)
        talk(one, "mira")
        page.open(one.url + "/#/agents")
        page.wait_text("mira")
        page.wait("!document.querySelector('.notice')")
        one.send(signal.SIGSTOP)
        until_role(two, "active")
        until_served(two)
        one.send(signal.SIGCONT)
        page.wait_text("This is the standby router.")
        picture(page, "standby-360")
        page.wait("document.querySelector('.live').textContent === 'live'")
        talk(two, "of-the-new-router")
        page.click("Events", "nav a")
        page.wait_text("of-the-new-router ended a turn on")  # which no heartbeat reports
        assert overflow(page) == []
        assert page.faults == []
