"""The active router is killed or frozen under streams: the other one serves, nodes refuse the old.

Real processes and real nodes; partitions are the simulation's (`tests/sim/test_two_routers.py`).
"""

import signal
import threading
import time
from contextlib import ExitStack, suppress

import httpx2
import pytest

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import Done, DrainNode
from fabric.ids import NodeName
from fabric.settings import NodeSettings
from node.runtime.identity import NodeConfig
from tests.support.node_process import NodeProcess
from tests.support.router_process import ControlRelay, RouterProcess
from tests.support.services import KEY
from tests.support.tiny_models import LLAMA, write_model

pytestmark = pytest.mark.nightly
STREAMS, HANG_S = 50, 60.0
STEP_S = 0.02


@pytest.fixture
def fabric(tmp_path):
    model = write_model(tmp_path / "model", LLAMA)
    with ExitStack() as opened:
        nodes = {}
        for number, name in enumerate(("node-a", "node-b", "node-c")):
            config = NodeConfig(
                name=NodeName(name),
                data_dir=tmp_path / name,
                model=str(model),
                cluster_key=KEY,
                settings=NodeSettings(durability="none"),
                host="127.0.0.1",
                incarnation=number + 1,
            )
            nodes[name] = NodeProcess(config, STEP_S)
            opened.callback(nodes[name].kill)
        relay = ControlRelay(nodes)
        opened.callback(relay.close)
        routers = []
        for name in ("one", "two"):
            routers.append(RouterProcess(relay, tmp_path / f"{name}.log"))
            opened.callback(routers[-1].stop)
            until_role(routers[0], "active")
        until_role(routers[1], "standby")
        yield nodes, *routers


def shown(router):
    return httpx2.get(f"{router.url}/v1/router", timeout=HANG_S).json()


def until_role(router, role):
    end_s = time.monotonic() + HANG_S
    while shown(router)["role"] != role:
        assert time.monotonic() < end_s, shown(router)
        time.sleep(0.05)


def body(text, **more):
    model = "model"
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def ask(router, text, timeout_s=HANG_S, **more):
    return httpx2.post(
        f"{router.url}/v1/chat/completions", json=body(text, max_tokens=2, **more),
        timeout=timeout_s,
    )  # fmt: skip


def stream(router, number, begun):
    with (
        suppress(httpx2.HTTPError),
        httpx2.stream(
            "POST",
            f"{router.url}/v1/chat/completions",
            json=body(f"the cat {number} sat on the mat", max_tokens=400, stream=True),
            timeout=HANG_S,
        ) as answer,
    ):
        for _ in answer.iter_lines():
            begun.release()


def seconds_until_served(router):
    """Return how long it takes until a new turn is answered."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < HANG_S:
        with suppress(httpx2.HTTPError):
            if ask(router, "a new turn", timeout_s=5.0).status_code == 200:
                return time.monotonic() - began_s
        time.sleep(0.05)
    pytest.fail("no new turn was served")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_standby_serves_and_every_node_refuses_the_old_router(fabric, number, record_property):
    nodes, one, two = fabric
    assert ask(two, "by way of the standby").status_code == 200
    old = shown(one)["term"]
    begun = threading.Semaphore(0)
    streams = [threading.Thread(target=stream, args=(one, at, begun)) for at in range(STREAMS)]
    for each in streams:
        each.start()
    for _ in range(STREAMS):
        assert begun.acquire(timeout=HANG_S), "all streams run"
    one.send(number)
    seconds = seconds_until_served(two)
    record_property("seconds until a new turn was served", seconds)
    print(f"new turns after {seconds:.2f} s")
    assert shown(two)["role"] == "active"
    assert shown(two)["term"] > old
    for name, node in nodes.items():
        raw = node.control(encode_call(DrainNode(draining=False), old)).result(HANG_S)
        reply = decode_reply(Done, raw)
        assert isinstance(reply, ErrorReply), name
        assert (reply.status, reply.code) == (409, "old_router")
    if number is signal.SIGSTOP:
        one.send(signal.SIGCONT)
        until_role(one, "standby")
        assert ask(one, "by way of the new one").status_code == 200
        assert shown(two)["role"] == "active"
    else:
        one.stop()
    for each in streams:
        each.join(HANG_S)
