"""A restart of the router's process loses no request: streams end, new requests wait."""

import json
import threading
import time

import httpx2
import pytest

from fabric.ids import NodeName
from fabric.keys import OPERATOR_HEADER
from fabric.settings import NodeSettings
from node.runtime.identity import NodeConfig
from tests.support.node_process import NodeProcess
from tests.support.router_process import OPERATOR_KEY, ControlRelay, RouterProcess
from tests.support.services import KEY
from tests.support.standby_fabric import (
    HANG_S,
    HEADERS,
    STEP_S,
    ask,
    body,
    seconds_until_served,
    two_routers,
)
from tests.support.tiny_models import LLAMA, write_model

pytestmark = pytest.mark.slow
OPERATOR = {OPERATOR_HEADER: OPERATOR_KEY}
WAITING = 8  # requests that arrive during the restart


@pytest.fixture
def router(tmp_path):
    model = write_model(tmp_path / "model", LLAMA)
    node = NodeProcess(
        NodeConfig(
            name=NodeName("node-a"),
            data_dir=tmp_path / "node-a",
            model=str(model),
            cluster_key=KEY,
            settings=NodeSettings(durability="none"),
            host="127.0.0.1",
            incarnation=1,
        ),
        STEP_S,
    )
    relay = ControlRelay({"node-a": node})
    made = RouterProcess(relay, tmp_path / "router.log", standby=False)
    yield made
    made.stop()
    relay.close()
    node.kill()


def router_row(router):
    return httpx2.get(f"{router.url}/v1/router", headers=OPERATOR, timeout=HANG_S).json()


def restart(router, wait_s):
    path = f"{router.url}/v1/router/restart"
    answer = httpx2.post(path, json={"wait_s": wait_s}, headers=OPERATOR, timeout=HANG_S)
    assert answer.status_code == 202, answer.text
    return answer.json()


def until_restarted(router, before):
    end_s = time.monotonic() + HANG_S
    while (now := router_row(router))["process"] == before["process"]:
        assert time.monotonic() < end_s, now
        time.sleep(0.05)
    return now


class Stream:
    """A streamed answer of `tokens` tokens, read by a thread."""

    def __init__(self, router, tokens):
        self.lines = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(router, tokens))
        self._thread.start()
        assert self._begun.wait(HANG_S)

    def _read(self, router, tokens):
        request = body("the cat sat on the mat", max_tokens=tokens, stream=True)
        url = f"{router.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=request, headers=HEADERS, timeout=HANG_S) as answer:
            for line in answer.iter_lines():
                self._begun.set()
                self.lines += [line] if line else []

    def final_lines(self):
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        return self.lines


def test_restarting_router_ends_its_stream_and_answers_waiting_requests(router):
    before, stream, statuses = router_row(router), Stream(router, 100), []
    again = restart(router, 60.0)
    asking = [
        threading.Thread(target=lambda n=n: statuses.append(ask(router, f"cat {n}").status_code))
        for n in range(WAITING)
    ]
    for each in asking:
        each.start()
    lines = stream.final_lines()
    for each in asking:
        each.join(HANG_S)
    now = until_restarted(router, before)

    assert lines[-1] == "data: [DONE]", lines[-2:]
    assert not any("error" in json.loads(line[6:]) for line in lines[:-1] if line[6:7] == "{")
    assert statuses == [200] * WAITING
    assert (now["pid"], again["process"]) == (before["pid"], before["process"])


def test_stream_outlasting_the_wait_of_a_restart_ends_with_an_error(router):
    before, stream = router_row(router), Stream(router, 4000)
    restart(router, 0.5)
    lines = stream.final_lines()
    until_restarted(router, before)

    assert "stopping" in lines[-1] or "stopping" in lines[-2], lines[-2:]
    assert ask(router, "hello again").status_code == 200


def test_standby_serves_while_the_active_router_restarts(tmp_path):
    with two_routers(tmp_path) as (_, one, two):
        before, stream = router_row(one), Stream(one, 100)
        restart(one, 60.0)
        seconds_until_served(two)
        lines = stream.final_lines()
        until_restarted(one, before)
        roles = [router_row(each)["role"] for each in (one, two)]
        forwarded = ask(one, "hello again").status_code

    assert lines[-1] == "data: [DONE]", lines[-2:]
    assert (roles, forwarded) == (["standby", "active"], 200)
