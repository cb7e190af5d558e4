"""The dashboard with 1,000 agents on eight nodes: all are shown, a page at a time, and live.

Delays are printed (`-s`) but not checked, as they depend on the machine.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fabric.control.node_calls import LastMatch
from router.events import AgentCreated, TurnBegan, TurnEnded
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import OPERATOR_KEY, rig
from tests.support.browser import Browser, browser

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

AGENTS, MARKERS, EVENTS_BETWEEN = 1000, 20, 20
STEADY_S, TURNS_PER_S = 8.0, 20
LETTERS = "abcdefgh"
WATCH = """
window.seen = {};
new MutationObserver(() => {
  const row = document.querySelector('tbody th a');
  const name = row && row.textContent;
  if (name) window.listed ??= performance.now();
  if (name && name.startsWith('marker') && !window.seen[name]) {
    window.seen[name] = (performance.timeOrigin + performance.now()) / 1000;
  }
}).observe(document, {subtree: true, childList: true, characterData: true});
"""


class Fleet:
    """Router over fake nodes, in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.fabric: Any = None
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(
            target=self.loop.run_until_complete, args=[self._run()], daemon=True
        )
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        nodes = [FakeNode(f"node-{letter}") for letter in LETTERS]
        for number in range(AGENTS):
            node, name = nodes[number % len(nodes)], f"agent-{number:04}"
            match = LastMatch("extend", 900, 1000, "the prompt extends the stored context")
            node.memory["default", name] = Memory(
                "default", name, 1, text="x" * 4000, last_match=match
            )
        async with rig(nodes=nodes) as self.fabric:
            self._ready.set()
            await self._over.wait()

    def call(self, work: Any) -> Any:
        """Run a function in the router's thread; return its result."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def publish(self, *events: Any) -> None:
        self.call(lambda: [self.fabric.fleet.events.publish(event) for event in events])

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)
        self.loop.close()


@contextmanager
def fleet() -> Iterator[Fleet]:
    instance = Fleet()
    try:
        yield instance
    finally:
        instance.close()


def turn_of(name: str) -> tuple[TurnBegan, TurnEnded]:
    key = ("default", name)
    began = TurnBegan(key, "node-a", 1, "hot", 1000, 900, None, "extend", "it extends")
    return began, TurnEnded(key, "node-a", "ok", 50, 0.5)


def steady_share(running: Fleet) -> float:
    """Return the part of a core that the router takes while turns end at a steady rate."""
    cpu_s, began_s = running.call(time.thread_time), time.monotonic()
    for number in range(int(STEADY_S * TURNS_PER_S)):
        running.publish(*turn_of(f"agent-{(7 * number) % AGENTS:04}"))
        time.sleep(max(0.0, began_s + (number + 1) / TURNS_PER_S - time.monotonic()))
    return float((running.call(time.thread_time) - cpu_s) / (time.monotonic() - began_s))


def open_agents(page: Browser, url: str) -> None:
    """Open the list of all agents as an operator, in a new page."""
    page.open(url + "/dashboard/icon.svg")
    page.run(f"sessionStorage.setItem('macfabric.operator-key', {json.dumps(OPERATOR_KEY)})")
    page.open(url + "/#/agents")
    page.wait("document.querySelectorAll('tbody tr').length")


def test_thousand_agents_are_shown_and_followed(tmp_path):
    with fleet() as running, browser(tmp_path / "profile") as page:
        page.resize(1280, 800)
        page.run_first(WATCH)
        share_without = steady_share(running)
        open_agents(page, running.fabric.url)
        page.wait_text(f"{AGENTS:,} agents")
        paints = page.run(
            "performance.getEntriesByType('paint').map((p) => [p.name, Math.round(p.startTime)])"
        )
        listed = page.run("Math.round(window.listed)")
        rows = page.run("document.querySelectorAll('tbody tr').length")
        share_with = steady_share(running)
        published = {}
        for number in range(MARKERS):
            name = f"marker-{number}"
            for other in range(EVENTS_BETWEEN):
                running.publish(*turn_of(f"agent-{(7 * number + other) % AGENTS:04}"))
            published[name] = time.time()  # noqa: TID251 - which the browser reads as well
            running.publish(AgentCreated(("default", name), "node-a", 1))
            page.wait(f"window.seen[{json.dumps(name)}]")
        shown_s = page.run("window.seen")
        late_ms = sorted(1000 * (shown_s[name] - at_s) for name, at_s in published.items())
        running.publish(*turn_of("agent-0999"))
        page.wait("document.querySelector('tbody th a').textContent === 'agent-0999'")
        faults = list(page.faults)

    print(f"paint (ms) {paints}, rows after {listed} ms")
    print(f"late (ms): median {late_ms[len(late_ms) // 2]:.0f}, most {late_ms[-1]:.0f}")
    print(
        f"router with its fake nodes, {TURNS_PER_S} turns a second: {share_with:.1%} of a core, "
        f"without the page {share_without:.1%}"
    )
    assert rows == 50
    assert len(shown_s) == MARKERS
    assert faults == []
