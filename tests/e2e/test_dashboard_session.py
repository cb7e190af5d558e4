"""Sessions with the dashboard on a real `macfabric up --nodes 2`: each action uses the page's own
controls, and its effect is then checked by the API.

Screenshots of each step, and an animation of them if Pillow is installed, are saved in the test's
folder, or in the folder that MACFABRIC_TESTS_PICTURES names.
"""

import base64
import hashlib
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from fabric.hosting.chip import chip_name
from fabric.keys import OPERATOR_HEADER
from tests.support.browser import Browser, browser
from tests.support.dashboard import (
    PICTURES,
    SIZES,
    VIEWS,
    go,
    overflow,
    picture,
    show,
    sign_in,
    violations,
)
from tests.support.fabric_process import ALICE, BOB
from tests.support.up_fabric import Up, running_up

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.cluster]

NODES = ("node-a", "node-b")
FRAME_MS = 1500
RELOADS = 3
SECRET = "otter lantern quartz"
STORY = "the cat sat on the mat and looked at the dog. " * 40  # longer than a block


class Session:
    """Browser on a running fabric, an HTTP client beside it, and the pictures so far."""

    def __init__(self, name: str, page: Browser, up: Up, http: httpx2.Client, folder: Path) -> None:
        self._name = name
        self.page = page
        self.up = up
        self._http = http
        self._folder = Path(os.environ.get(PICTURES) or folder)
        self._names: list[str] = []

    def step(self, name: str) -> None:
        """Take a picture of the window."""
        numbered = f"{self._name}-{len(self._names) + 1:02}-{name}"
        self._names.append(numbered)
        self.page.run("new Promise((done) => setTimeout(done, 300))")
        picture(self.page, numbered, self._folder)

    def write_film(self) -> None:
        """Join the pictures to an animation."""
        with suppress(ImportError):
            from PIL import Image

            frames = [Image.open(self._folder / f"{name}.png").convert("P") for name in self._names]
            path = self._folder / f"{self._name}.gif"
            frames[0].save(path, append_images=frames[1:], duration=FRAME_MS, loop=0)

    @property
    def operator_key(self) -> str:
        """Key that `up` wrote into its data folder."""
        return (self.up.data / "operator.key").read_text().strip()

    def get(self, path: str, key: str = "") -> Any:
        """Return the API's answer, or None for 404."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers[OPERATOR_HEADER] = self.operator_key
        answer = self._http.get(path, headers=headers)
        assert answer.status_code in (200, 404), answer.text
        return answer.json() if answer.status_code == 200 else None

    def owner(self, agent: str, key: str = "") -> str:
        """Return the node that owns an agent."""
        return str(self.get(f"/v1/agents/{agent}", key)["owner"])

    def drain_state(self, node: str) -> str | None:
        """Return the state of a node's drain, or None if it takes agents."""
        [row] = [row for row in self.get("/v1/nodes")["data"] if row["name"] == node]
        return row["drain"] and row["drain"]["state"]

    def talk(self, agent: str, key: str = "") -> httpx2.Response:
        """Ask an agent for its code, and check the answer."""
        code = f"The vault code of {agent.title()} is"
        messages = [
            {"role": "user", "content": f"{code} {SECRET}. {STORY}"},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": code},
        ]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = self._http.post(
            "/v1/chat/completions",
            json={"model": "recall", "messages": messages, "max_tokens": 8},
            headers=headers | {"x-agent-id": agent},
        )
        assert answer.status_code == 200, answer.text
        assert SECRET in answer.json()["choices"][0]["message"]["content"]
        return answer

    def move(self, agent: str, target: str) -> None:
        """Move the opened agent with the page's dialog."""
        self.page.click("Move …")
        self.page.choose(target, "dialog select")
        self.step("move-dialog")
        self.page.click("Move", "dialog button")
        self.page.wait_text(f"{agent} moved to {target} in")
        self.step("moved")


@contextmanager
def session(name: str, folder: Path, **router: Any) -> Iterator[Session]:
    """Run a fabric and a browser for a block of code."""
    with running_up(folder, router=router, names=NODES) as up:
        trust = ssl.create_default_context()
        switches = []
        if up.url.startswith("https"):
            trust.load_verify_locations(up.data / "ca.pem")
            switches = [f"--ignore-certificate-errors-spki-list={_key_digest(up.url)}"]
        with (
            httpx2.Client(base_url=up.url, timeout=120, verify=trust) as http,
            browser(folder / "profile", *switches) as page,
        ):
            page.resize(*SIZES["1280"])
            opened = Session(name, page, up, http, folder / "pictures")
            yield opened
            opened.write_film()
            assert page.faults == []


def _key_digest(url: str) -> str:
    """Return the digest of the server's public key, for the browser to trust."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    pem = ssl.get_server_certificate((parts.hostname, parts.port))
    key = load_pem_x509_certificate(pem.encode()).public_key()
    raw = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(raw).digest()).decode()


def test_agents_are_moved_drained_and_erased_by_the_page(tmp_path):
    with session("plain", tmp_path, api_keys={}) as opened:
        page = opened.page
        page.open(opened.up.url + "/")
        page.wait_text("Use this fabric")
        opened.step("empty")
        source = opened.talk("mira").headers["x-macfabric-node"]
        page.wait_text("mira")
        on_map = "[...document.querySelectorAll('.mac')].map((mac) => mac.textContent).join()"
        assert "1 agent" in page.run(on_map)
        opened.talk("ivan")
        page.click("Sign in …")
        page.type(opened.operator_key, "label:nth-of-type(2) input")
        opened.step("operator-key")
        page.click("Sign in", "main button")
        page.wait_text("tenant default, operator")
        chip = chip_name()
        page.wait_text(chip or "Heat")
        for number in range(RELOADS):  # just after a turn, before a heartbeat has reported its end
            page.run("window.isOld = true")
            opened.talk(f"ivan-{number}")
            page.send("Page.reload")
            page.wait("!window.isOld && document.body")
            page.wait_text("tenant default, operator")
            page.wait("!document.querySelector('.chip.busy')")
        opened.step("fleet")

        target = next(name for name in NODES if name != source)
        page.click("mira")
        page.wait_text("first token after")
        opened.move("mira", target)
        assert opened.owner("mira") == target
        answer = opened.talk("mira")
        assert answer.headers["x-macfabric-node"] == target
        assert int(answer.headers["x-macfabric-cached-tokens"]) > 0
        page.wait_text(f"it had moved here from {source}")

        drain(opened, target)
        erase(opened)
        follow_scenario(opened)
        look_at_all_views(opened)


def drain(opened: Session, node: str) -> None:
    """Drain a node until its agents have moved, then undrain it."""
    page = opened.page
    assert opened.owner("mira") == node
    page.click("Fleet", "nav a")
    page.click(f"Drain {node}")
    opened.step("drain-dialog")
    page.click("Drain", "dialog button")
    page.wait_text("Drained: it may be closed or switched off.")
    opened.step("drained")
    assert opened.drain_state(node) == "drained"
    assert {opened.owner(agent) for agent in ("mira", "ivan")}.isdisjoint({node})
    assert opened.talk("mira").headers["x-macfabric-node"] != node

    page.click(f"Undrain {node}")
    page.wait_text(f"{node} takes agents again")
    page.wait_text(f"Drain {node}")
    opened.step("undrained")
    assert opened.drain_state(node) is None


def erase(opened: Session) -> None:
    """Erase an agent, which requires typing its whole id."""
    page = opened.page
    go(page, "agents/default%2Fmira")
    page.click("Erase", "aside button")
    page.wait("document.querySelector('dialog[open]')")
    page.type("mir", "dialog input")
    page.wait("document.querySelector('dialog button[type=submit]').disabled")
    page.key("Enter")
    page.wait("document.querySelector('dialog[open]')")
    assert opened.get("/v1/agents/mira") is not None
    page.type("a", "dialog input")
    opened.step("erase-dialog")
    page.click("Erase permanently", "dialog button")
    page.wait_text("mira was erased")
    opened.step("erased")
    assert opened.get("/v1/agents/mira") is None
    assert opened.get("/v1/agents/ivan") is not None
    assert not page.run("[...document.querySelectorAll('tbody th')].some((r) => /mira/.test(r))")


def follow_scenario(opened: Session) -> None:
    """Follow the transcript of a run that the command line has started."""
    page = opened.page
    page.click("Scenarios", "nav a")
    page.wait_text("No run yet")
    argv = [sys.executable, "-m", "router.cli.main", "scenario", "run", "debate", "--run", "monday"]
    command = subprocess.Popen(
        [*argv, "--url", opened.up.url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reading = threading.Thread(target=lambda: command.stdout and command.stdout.read())
    reading.start()
    try:
        page.click("A debate", "main a")
        page.wait("document.querySelectorAll('.lines .speech').length >= 1")
        opened.step("transcript")
        page.wait_text("The run ended")
    finally:
        command.wait(120)
        reading.join(60)
        assert command.stdout is not None
        command.stdout.close()
    spoken = page.run("document.querySelectorAll('.lines .speech').length")
    turns = opened.get("/v1/scenarios/monday")["turns"]
    assert spoken == turns["done"] == turns["total"]
    page.wait_text(f"{spoken} of {spoken} turns")
    opened.step("run-ended")


def look_at_all_views(opened: Session) -> None:
    """Check each view in both themes with axe and against the window's width."""
    page, wrong = opened.page, []
    for theme in ("light", "dark"):
        page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        for size, (width, height) in SIZES.items():
            page.resize(width, height)
            for view in (*VIEWS, "agents/default%2Fivan"):
                show(page, view)
                wrong += [f"{theme} {size} {view}: {each}" for each in overflow(page)]
                if size != "4k":
                    wrong += [f"{theme} {size} {view}: {each}" for each in violations(page)]
                name = view.rpartition("%2F")[2]
                picture(page, f"real-{theme}-{size}-{name}", opened.up.data.parent / "pictures")
    assert not wrong, "\n".join(wrong)


def test_tenant_and_operator_use_the_page_by_https(tmp_path):
    keys = {"alice": ALICE, "bob": BOB}
    settings = {"tls": {"mode": "always"}, "loopback_without_key": False}
    with session("https", tmp_path, api_keys=keys, **settings) as opened:
        page, url = opened.page, opened.up.url
        source = opened.talk("mira", ALICE).headers["x-macfabric-node"]
        opened.talk("boris", BOB)
        sign_in(page, url, ALICE)
        page.wait_text("tenant alice")
        page.click("Agents", "nav a")
        page.wait_text("mira")
        assert "boris" not in page.run("document.body.innerText")
        target = next(name for name in NODES if name != source)
        page.click("mira")
        page.wait_text("first token after")
        opened.move("mira", target)
        assert opened.owner("mira", ALICE) == target
        page.click("Sign out")
        page.wait_text("only with a key")

        page.type(opened.operator_key, "label:nth-of-type(2) input")
        page.click("Sign in", "main button")
        page.wait_text("mira")
        page.wait_text("boris")
        assert "no longer exists" not in page.run("document.body.innerText")
        opened.step("operator-alone")
        page.click("boris")
        page.wait_text("also sign in with a key of tenant bob")
        assert "Erase …" not in page.run("document.body.innerText")
        drain_state = opened.drain_state(target)
        assert drain_state is None
        page.click("Fleet", "nav a")
        page.click(f"Drain {target}")
        page.click("Drain", "dialog button")
        page.wait_text("Drained: it may be closed or switched off.")
        assert opened.owner("mira", ALICE) == source
        assert page.run("isSecureContext")
