"""A node whose machine sleeps: its agents are served elsewhere at once, until it wakes."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from router.limits import LEASE_S
from tests.support.local_fabric import local_fabric
from tests.support.tiny_models import ONE_LAYER, write_model
from tests.support.waiting import wait_until

IGNORE_END = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the dog sat on the log. " * 24}]


@pytest.fixture
def fabric(tmp_path):
    model = str(write_model(tmp_path / "model", ONE_LAYER))
    with local_fabric(tmp_path, model, "node-a", "node-b") as instance:
        yield instance


def states(fabric):
    return {row["name"]: row["state"] for row in fabric.http.get("/v1/nodes").json()["data"]}


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def test_agents_of_sleeping_node_are_served_elsewhere_until_it_wakes(fabric):
    first = fabric.chat(MESSAGES, agent="mira", max_tokens=8)
    service = fabric.services[first.node]
    sleep = service.node.background.sleep

    before_s = time.monotonic()
    on_loop(service, sleep.leave())
    wait_until(lambda: states(fabric)[first.node] == "asleep")
    left_s = time.monotonic() - before_s
    elsewhere = fabric.chat(MESSAGES, agent="mira", max_tokens=8)

    assert left_s < LEASE_S
    assert elsewhere.node != first.node
    assert elsewhere.text == first.text
    assert elsewhere.epoch > first.epoch

    on_loop(service, sleep.come_back())
    wait_until(lambda: states(fabric)[first.node] == "ready")
    again = fabric.chat(MESSAGES, agent="mira", max_tokens=8)
    assert (again.node, again.text) == (elsewhere.node, first.text)


def test_running_turn_is_saved_and_retried_elsewhere(fabric):
    whole = fabric.chat(MESSAGES, agent="whole", max_tokens=200, extra_body=IGNORE_END)
    where = fabric.chat(MESSAGES, agent="mira", max_tokens=1).node
    service = fabric.services[where]

    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            fabric.chat, MESSAGES, agent="mira", max_tokens=200, extra_body=IGNORE_END
        )
        wait_until(lambda: len(service.node.live_turns))
        on_loop(service, service.node.background.sleep.leave())
        with pytest.raises(openai.APIStatusError) as error:
            running.result()

    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"]
    wait_until(lambda: states(fabric)[where] == "asleep")
    retried = fabric.chat(MESSAGES, agent="mira", max_tokens=200, extra_body=IGNORE_END)
    assert (retried.text, retried.node != where) == (whole.text, True)
