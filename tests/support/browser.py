"""Headless Chromium, driven by its DevTools protocol; no library but aiohttp."""

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60.0
POLL_S = 0.05
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


def chromium() -> str:
    """Return the browser's path; skip the test if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium (on Debian: apt install chromium)")
    return found


class Browser:
    """Page of the browser; methods return when their effect is visible."""

    def __init__(self, folder: Path, *switches: str) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.faults: list[str] = []  # script errors and violations of the page's content policy
        self._process = subprocess.Popen(
            [
                chromium(),
                "--headless=new",
                "--no-sandbox",  # as root in containers it has none
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                *switches,
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        port_file = self._folder / "DevToolsActivePort"
        async with asyncio.timeout(WAIT_S):
            while not port_file.exists() or not port_file.read_text().strip():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [each for each in await answer.json() if each["type"] == "page"]
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable")

    async def _send(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    return message["result"]
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            entry = params["entry"]
            # A request that is answered with an error is not a fault of the page.
            if entry["level"] == "error" and entry["source"] != "network":
                self.faults.append(f"{entry['text']} {entry.get('url', '')}")

    def send(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol and return its result."""
        return self._loop.run_until_complete(self._send(method, **params))

    def open(self, url: str) -> None:
        """Load a page."""
        self.send("Page.navigate", url=url)

    def run_first(self, script: str) -> None:
        """Run a script in each page opened from now on, before the page's own scripts."""
        self.send("Page.addScriptToEvaluateOnNewDocument", source=script)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, awaited if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = WAIT_S) -> None:
        """Wait until an expression is true in the page."""

        async def poll() -> None:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = await self._send(
                        "Runtime.evaluate", expression=f"Boolean({condition})", returnByValue=True
                    )
                    if answer["result"].get("value") is True:
                        return
                    await asyncio.sleep(POLL_S)

        try:
            self._loop.run_until_complete(poll())
        except TimeoutError:
            text = self.run("document.body.innerText")
            message = f"never true: {condition}\n{text}\n{self.faults}"
            raise AssertionError(message) from None

    def wait_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, text: str, selector: str = "button, a, summary") -> None:
        """Click the first visible element that has this text with the mouse."""
        find = (
            f"[...document.querySelectorAll({json.dumps(selector)})].find((e) =>"
            f" e.textContent.trim().replace(/\\s+/g, ' ').startsWith({json.dumps(text)})"
            " && e.checkVisibility() && !e.disabled && (!document.querySelector('dialog[open]')"
            " || e.closest('dialog')))"
        )
        box: list[float] = []
        while not box:  # elements may move while the page is rendered
            self.wait(find)
            box = self.run(
                f"(async () => {{ const e = {find}; if (!e) return [];"
                " e.scrollIntoView({block: 'center', behavior: 'instant'});"
                " const frame = () => new Promise((done) => requestAnimationFrame(done));"
                " await frame(); await frame(); const b = e.getBoundingClientRect();"
                " const at = [b.x + b.width / 2, b.y + b.height / 2];"
                " const top = document.elementFromPoint(...at);"
                " return top && (e.contains(top) || top.contains(e)) ? at : []; })()"
            )
        self.press_mouse(*box)

    def press_mouse(self, x: float, y: float) -> None:
        """Click at a position in the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str, selector: str) -> None:
        """Enter a text into a field."""
        self.wait(f"Boolean(document.querySelector({json.dumps(selector)}))")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def choose(self, value: str, selector: str) -> None:
        """Choose an option of a list by its value."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.run(
            f"(() => {{ const s = document.querySelector({json.dumps(selector)});"
            f" s.value = {json.dumps(value)};"
            " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def key(self, name: str) -> None:
        """Press a key."""
        code = KEYS[name]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **text,
            )

    def resize(self, width: int, height: int) -> None:
        """Give the window a size in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, **features: str) -> None:
        """Set media features, such as prefers_color_scheme."""
        named = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save a screenshot of the window, or of the whole page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""

        async def end() -> None:
            await self._socket.close()
            await self._session.close()

        self._loop.run_until_complete(end())
        self._loop.close()
        self._process.terminate()
        self._process.wait(WAIT_S)


@contextmanager
def browser(folder: Path, *switches: str) -> Iterator[Browser]:
    """Start a browser with its own profile, and further switches, for a block of code."""
    chromium()
    started = Browser(folder, *switches)
    try:
        yield started
    finally:
        started.close()
