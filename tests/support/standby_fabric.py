"""Real nodes, two router processes of which one is the standby, and their clients."""

import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx2

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import Done, DrainNode
from fabric.ids import NodeName
from fabric.settings import NodeSettings
from node.runtime.identity import NodeConfig
from tests.support.node_process import NodeProcess
from tests.support.router_process import API_KEY, ControlRelay, RouterProcess
from tests.support.services import KEY
from tests.support.tiny_models import LLAMA, write_model

STREAMS, HANG_S = 50, 60.0
STEP_S = 0.02
NODES = ("node-a", "node-b", "node-c")
HEADERS = {"authorization": f"Bearer {API_KEY}"}


@contextmanager
def two_routers(folder, far=None):
    """Start three nodes, the active router, and the standby.

    With `far`, the active router runs in that namespace, and the others listen on its host.
    """
    host = far.host if far else "127.0.0.1"
    model = write_model(folder / "model", LLAMA)
    with ExitStack() as opened:
        nodes = {}
        for number, name in enumerate(NODES):
            config = NodeConfig(
                name=NodeName(name),
                data_dir=folder / name,
                model=str(model),
                cluster_key=KEY,
                settings=NodeSettings(durability="none"),
                host=host,
                incarnation=number + 1,
            )
            nodes[name] = NodeProcess(config, STEP_S)
            opened.callback(nodes[name].kill)
        relay = ControlRelay(nodes, host)
        opened.callback(relay.close)
        if far:
            one = RouterProcess(relay, folder / "one.log", "0.0.0.0", far.prefix)
            one.url = one.url.replace("127.0.0.1", far.client_address)
        else:
            one = RouterProcess(relay, folder / "one.log")
        opened.callback(one.stop)
        until_role(one, "active")
        two = RouterProcess(relay, folder / "two.log", host)
        opened.callback(two.stop)
        until_role(two, "standby")
        yield nodes, one, two


def shown(router):
    return httpx2.get(f"{router.url}/v1/router", headers=HEADERS, timeout=HANG_S).json()


def until_role(router, role):
    end_s = time.monotonic() + HANG_S
    while shown(router)["role"] != role:
        assert time.monotonic() < end_s, shown(router)
        time.sleep(0.05)


def body(text, **more):
    return {"model": "model", "messages": [{"role": "user", "content": text}], **more}


def ask(router, text, timeout_s=HANG_S, **more):
    return httpx2.post(
        f"{router.url}/v1/chat/completions",
        json=body(text, max_tokens=2, **more),
        headers=HEADERS,
        timeout=timeout_s,
    )


def _stream(router, number, first_lines):
    with (
        suppress(httpx2.HTTPError),
        httpx2.stream(
            "POST",
            f"{router.url}/v1/chat/completions",
            json=body(f"the cat {number} sat on the mat", max_tokens=400, stream=True),
            headers=HEADERS,
            timeout=HANG_S,
        ) as answer,
    ):
        for _ in answer.iter_lines():
            first_lines.release()


@contextmanager
def streams_through(router):
    """Run many streams through a router during a block; then wait for their ends."""
    first_lines = threading.Semaphore(0)
    streams = [
        threading.Thread(target=_stream, args=(router, at, first_lines)) for at in range(STREAMS)
    ]
    for each in streams:
        each.start()
    for _ in range(STREAMS):
        assert first_lines.acquire(timeout=HANG_S), "not every stream began"
    yield
    for each in streams:
        each.join(HANG_S)


def seconds_until_served(router):
    """Return the seconds until a new turn is served."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < HANG_S:
        with suppress(httpx2.HTTPError):
            if ask(router, "a new turn", timeout_s=5.0).status_code == 200:
                return time.monotonic() - began_s
        time.sleep(0.05)
    message = "no new turn was served"
    raise AssertionError(message)


def check_refused(nodes, term):
    """Check that every node refuses a change made under this term."""
    for name, node in nodes.items():
        raw = node.control(encode_call(DrainNode(draining=False), term)).result(HANG_S)
        reply = decode_reply(Done, raw)
        assert isinstance(reply, ErrorReply), name
        assert (reply.status, reply.code) == (409, "old_router")
