"""The dashboard in headless Chromium on a real fabric: views, actions, and isolation of tenants."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.browser import Browser, browser
from tests.support.dashboard import SIZES, VIEWS, go, overflow, picture, show, sign_in, violations
from tests.support.local_fabric import OPERATOR_KEY, LocalFabric
from tests.support.tiny_models import ONE_LAYER, write_model

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

ANN, BOB = "key-of-ann-of-the-dashboard", "key-of-bob-of-the-dashboard"
SYSTEM = "the cat sat on the mat and the dog sat on the log. " * 12
NODES = ["node-a", "node-b", "node-c"]


class Fabric(LocalFabric):
    """Fabric with two tenants, each with some agents."""

    def talk(self, key: str, agent: str, turns: int = 1) -> None:
        """Take turns of an agent of a key's tenant."""
        client = httpx2.Client(
            base_url=self.url, timeout=120, headers={"authorization": f"Bearer {key}"}
        )
        messages = [{"role": "user", "content": f"{agent}: {SYSTEM}"}]
        with client:
            for _ in range(turns):
                body = {"model": self.model_name, "messages": messages, "max_tokens": 8}
                headers = {"x-agent-id": agent}
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["message"]["content"] or ""
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and then?"},
                ]

    def agent(self, agent: str, key: str = ANN) -> dict[str, Any] | None:
        """Return an agent as the API shows it, or None if it does not exist."""
        url, headers = f"{self.url}/v1/agents/{agent}", {"authorization": f"Bearer {key}"}
        answer = httpx2.get(url, headers=headers, timeout=60)
        assert answer.status_code in (200, 404), answer.text
        return answer.json() if answer.status_code == 200 else None

    def restart_router_here(self) -> None:
        """Stop the router and start another one at the same port."""
        self._stop_router()
        self._start_router()


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[Fabric]:
    folder: Path = tmp_path_factory.mktemp("dashboard")
    model = str(write_model(folder / "model", ONE_LAYER))
    keys, settings = {"ann": ANN, "bob": BOB}, {"loopback_without_key": False}
    instance = Fabric(folder, model, NODES, api_keys=keys, router=settings)
    try:
        for number in range(4):
            instance.talk(ANN, f"ann-{number}", 1 + number % 3)
        instance.talk(BOB, "bob-0")
        yield instance
    finally:
        instance.stop()


@pytest.fixture
def page(tmp_path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as instance:
        instance.resize(*SIZES["1280"])
        yield instance
        assert instance.faults == []


def test_unknown_key_is_refused_in_words(page, fabric):
    sign_in(page, fabric.url, "no such key")
    page.wait_text("The router does not accept this key.")

    assert "ann-0" not in page.run("document.body.innerText")


def test_tenant_sees_only_its_agents(page, fabric):
    sign_in(page, fabric.url, BOB)
    page.wait_text("tenant bob")
    go(page, "agents")
    page.wait_text("bob-0")

    text = page.run("document.body.innerText")
    assert "ann-" not in text
    assert "Decisions" not in text
    assert "Drain" not in text
    go(page, "agents/" + "%2Fann-0")
    page.wait_text("no longer exists")
    page.click("Sign out")
    page.wait_text("API key")
    assert "bob-0" not in page.run("document.body.innerText")


def test_key_leaves_no_trace_that_another_site_could_send(page, fabric):
    sign_in(page, fabric.url, ANN)
    page.wait_text("tenant ann")

    assert page.run("document.cookie") == ""
    assert page.send("Network.getAllCookies")["cookies"] == []
    assert ANN not in page.run("JSON.stringify(localStorage) + location.href")


def test_operator_sees_all_and_acts_on_no_tenant(page, fabric):
    sign_in(page, fabric.url, operator_key=OPERATOR_KEY)
    page.wait_text("operator")
    go(page, "agents")
    page.wait_text("ann-0")
    page.wait_text("bob-0")
    page.click("ann-0")
    page.wait_text("also sign in with a key of tenant ann")
    page.wait_text("first token after")

    assert (
        page.run(
            "[...document.querySelectorAll('button')].some((b) => /^Erase/.test(b.textContent))"
        )
        is False
    )


def test_operator_with_key_of_one_tenant_cannot_act_on_same_name_of_another(page, fabric):
    fabric.talk(ANN, "twin")
    fabric.talk(BOB, "twin")
    sign_in(page, fabric.url, ANN, OPERATOR_KEY)
    page.wait_text("tenant ann, operator")
    go(page, "agents/bob%2Ftwin")
    page.wait_text("also sign in with a key of tenant bob")
    go(page, "agents/ann%2Ftwin")
    page.wait("[...document.querySelectorAll('button')].some((b) => /^Erase/.test(b.textContent))")


def test_agent_is_moved_by_keyboard(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "agents/%2Fann-1")
    page.wait_text("Move …")
    source = fabric.agent("ann-1")["owner"]
    target = next(name for name in NODES if name != source)
    page.run(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Move …').focus()"
    )
    page.key("Enter")
    page.wait("document.querySelector('dialog select')")
    page.wait("document.activeElement.closest('dialog')")
    page.choose(target, "dialog select")
    page.run("document.querySelector('dialog button[type=submit]').focus()")
    page.key("Enter")
    page.wait_text(f"ann-1 moved to {target} in")

    assert fabric.agent("ann-1")["owner"] == target
    fabric.talk(ANN, "ann-1")
    page.wait_text(f"it had moved here from {source}")


def test_agent_is_moved_by_dragging(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "agents")
    page.wait_text("ann-2")
    source = fabric.agent("ann-2")["owner"]
    target = next(name for name in NODES if name != source)
    page.run(
        "(() => { const from = [...document.querySelectorAll('tr[draggable]')]"
        ".find((r) => r.textContent.includes('ann-2'));"
        f" const to = document.querySelector('a[href=\"#/agents/on/{target}\"]');"
        " const data = new DataTransfer();"
        " const tell = (e, type) => e.dispatchEvent(new DragEvent(type,"
        " {bubbles: true, cancelable: true, dataTransfer: data}));"
        " tell(from, 'dragstart');"
        " for (const type of ['dragenter', 'dragover', 'drop']) tell(to, type); })()"
    )
    page.wait("document.querySelector('dialog select')")
    assert page.run("document.querySelector('dialog select').value") == target
    page.click("Move", "dialog button")
    page.wait_text(f"ann-2 moved to {target} in")

    assert fabric.agent("ann-2")["owner"] == target


def test_agent_is_pinned_forked_evicted_and_erased(page, fabric):
    fabric.talk(ANN, "short-lived")
    sign_in(page, fabric.url, ANN)
    go(page, "agents/%2Fshort-lived")
    page.click("Pin")
    page.wait_text("short-lived is pinned")
    page.click("Evict")
    page.click("Evict", "dialog button")
    page.wait_text("short-lived left the memory of")
    page.click("Fork")
    page.click("Fork", "dialog button")
    page.wait_text("short-lived-2 was forked from short-lived")
    assert fabric.agent("short-lived")["pinned"] is True
    assert fabric.agent("short-lived-2")["tokens"] > 0

    page.click("Erase", "aside button")
    page.wait_text("Cannot be undone.")
    assert page.run("document.querySelector('dialog button[type=submit]').disabled") is True
    page.type("short-lived", "dialog input")
    page.click("Erase permanently", "dialog button")
    page.wait_text("short-lived was erased")
    assert fabric.agent("short-lived") is None
    assert fabric.agent("short-lived-2") is not None
    page.wait("!document.body.innerText.includes('Erase …')")


def test_page_survives_broken_address(page, fabric):
    sign_in(page, fabric.url, ANN)
    page.wait_text("tenant ann")
    go(page, "agents/%E0%A4%A")
    page.wait_text("no longer exists")
    go(page, "no-such-view")
    page.wait_text("Macs ready")


def test_dialog_is_cancelled_by_escape(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "agents/%2Fann-0")
    page.click("Erase", "aside button")
    page.wait("document.querySelector('dialog[open]')")
    page.key("Escape")
    page.wait("!document.querySelector('dialog')")

    assert page.run("document.activeElement.textContent") == "Erase …"
    assert fabric.agent("ann-0") is not None


def test_node_is_drained_and_undrained(page, fabric):
    sign_in(page, fabric.url, ANN, OPERATOR_KEY)
    page.wait_text("tenant ann, operator")
    page.click("Drain node-a")
    page.click("Drain", "dialog button")
    page.wait_text("Drained: it may be closed or switched off.")
    page.wait_text("Undrain node-a")
    owners = {fabric.agent(f"ann-{number}")["owner"] for number in range(4)}
    page.click("Undrain node-a")
    page.wait_text("node-a takes agents again")
    page.wait_text("Drain node-a")

    assert "node-a" not in owners


def test_turns_appear_without_reload(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "agents")
    page.wait_text("ann-3")
    assert "late-comer" not in page.run("document.body.innerText")
    fabric.talk(ANN, "late-comer", 2)
    page.wait_text("late-comer")
    row = "[...document.querySelectorAll('tbody tr')].find((r) => /late-comer/.test(r.textContent))"
    page.wait(f"/node-.*hot.*disk.* KB/.test({row}.innerText.replace(/\\s/g, ' '))")
    go(page, "events")
    page.wait_text("late-comer ended a turn on")


def test_transcript_of_scenario_is_shown_as_it_is_spoken(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "scenarios")
    page.wait_text("No run yet")
    headers, body = {"authorization": f"Bearer {ANN}"}, {"scenario": "debate", "run": "monday"}
    answer = httpx2.post(f"{fabric.url}/v1/scenarios", json=body, headers=headers, timeout=60)
    assert answer.status_code == 202, answer.text
    page.click("monday", "main a, main span")
    page.wait("document.querySelectorAll('.lines .speech').length >= 1")
    page.wait_text("The run ended")
    spoken = page.run("document.querySelectorAll('.lines .speech').length")
    picture(page, "light-1280-transcript")
    page.click("Delete")
    page.wait_text("Its transcript and journals are removed.")
    page.click("Delete", "dialog button")
    page.wait_text("monday was deleted")
    page.wait_text("No run yet")

    assert spoken == 11


def test_shipped_scenario_is_started_and_cancelled(page, fabric):
    sign_in(page, fabric.url, BOB)
    go(page, "scenarios")
    page.click("Start a scenario")
    page.choose("gossip-network", "dialog select")
    page.click("Start", "dialog button")
    page.wait_text("has started")
    page.wait("document.querySelectorAll('.lines li').length >= 1")
    headers = {"authorization": f"Bearer {BOB}"}
    answer = httpx2.get(f"{fabric.url}/v1/scenarios", headers=headers, timeout=60)
    [run] = answer.json()["data"]
    assert run["scenario"] == "gossip-network"
    assert run["id"] in page.run("location.hash")
    if run["state"] == "running":
        page.click("Cancel the run")
        page.click("Cancel the run", "dialog button")
        page.wait_text("was cancelled")


def test_page_goes_on_after_router_restarts(page, fabric):
    sign_in(page, fabric.url, ANN)
    go(page, "agents")
    page.wait_text("ann-3")
    fabric.restart_router_here()
    page.wait("document.querySelector('.live').textContent === 'live'")
    fabric.await_agents()
    fabric.talk(ANN, "after-restart")
    page.wait_text("after-restart")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_views_have_no_accessibility_violation(page, fabric, theme):
    page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    page.open(fabric.url + "/")
    page.wait_text("Sign in")
    found = {"sign-in": violations(page)}
    sign_in(page, fabric.url, ANN, OPERATOR_KEY)
    page.wait_text("Map")
    for size, (width, height) in SIZES.items():
        page.resize(width, height)
        for view in [*VIEWS, "agents/ann%2Fann-2"]:
            show(page, view)
            if size != "4k":
                found[f"{size} {view}"] = violations(page)
            assert overflow(page) == [], (size, view)
            picture(page, f"{theme}-{size}-{view.split('/')[-1].replace('%2F', '-')}")
    page.click("Erase", "aside button")
    page.wait("document.querySelector('dialog[open]')")
    found["dialog"] = violations(page)
    picture(page, f"{theme}-dialog")

    wrong = [f"{where}: {hit}" for where, hits in found.items() for hit in hits]
    assert not wrong, "\n".join(wrong)
