"""Our clients bypass proxies, which do not reach this machine's addresses."""

import json
import time

import pytest

from benchmarks.chat_client import ChatClient
from router.cli.demo.demo_client import CHAT, Conversation, Pulse, Speaker
from router.cli.demo.demo_script import make_agents
from router.client.client import Fabric
from tests.cli.fake_fabric import ANSWERS

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": 2}
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
    for word in ("otter", " lantern")
]
FRAMES = [json.dumps(chunk) for chunk in [*CHUNKS, {"choices": [], "usage": USAGE}]] + ["[DONE]"]


@pytest.fixture(autouse=True)
def proxied(monkeypatch):
    """Set all the usual proxy variables to a port at which nothing listens."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def streaming(fabric, monkeypatch):
    """Return a fabric that streams one answer to every request."""
    monkeypatch.setitem(ANSWERS, ("POST", CHAT), {"object": "chat.completion.chunk"})
    fabric.page = "".join(f"data: {frame}\n\n" for frame in FRAMES).encode()
    fabric.media_type = "text/event-stream"
    return fabric


def test_demo_bypasses_proxies(streaming):
    agent = make_agents()[0]
    turn = Speaker(Fabric(streaming.url), "recall").ask(Conversation(agent), agent.facts[0], "cold")

    assert (turn.problem, turn.answer) == ("", "otter lantern")


def test_demo_health_check_bypasses_proxies(fabric):
    pulse = Pulse(fabric.url)
    pulse.start()
    while not pulse.asked:
        time.sleep(0.01)
    pulse.stop()

    assert pulse.failures == []


def test_benchmarks_bypass_proxies(streaming):
    answer = ChatClient(streaming.url, "recall").chat([{"role": "user", "content": "hi"}], 2)

    assert answer.completion_tokens == 2
    assert answer.text == "otter lantern"


def test_queries_bypass_proxies(fabric, run):
    for command in ("nodes", "agents", "status"):
        status, _, err = run(command, "--url", fabric.url)
        assert (status, err) == (0, ""), command
