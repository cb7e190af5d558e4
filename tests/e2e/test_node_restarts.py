"""A fabric of one node whose process restarts repeatedly behind the same router.

The router must send turns to the new process's address, with the same port or another one, and
must not reuse a connection to the old process.
"""

import itertools
import socket
import time
from contextlib import suppress
from types import SimpleNamespace

import openai
import pytest

from node import service as node_service
from tests.support import services
from tests.support.local_fabric import local_fabric
from tests.support.process_fabric import process_fabric
from tests.support.tiny_models import LLAMA, write_model

RESTARTS = 4
TRIES = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", LLAMA))


@pytest.fixture
def same_port(monkeypatch):
    """Make every node listen at the first one's port."""
    create, ports = socket.create_server, []

    def listen(address, **options):
        listener = create((address[0], ports[0] if ports else address[1]), **options)
        ports[:] = [listener.getsockname()[1]]
        return listener

    names = ("IPPROTO_TCP", "TCP_NODELAY")
    constants = {name: getattr(socket, name) for name in names}
    monkeypatch.setattr(node_service, "socket", SimpleNamespace(create_server=listen, **constants))


def talk(fabric, messages):
    """Take one turn of an agent; return the number of reused tokens."""
    answer = fabric.chat(messages, agent="mira", max_tokens=8)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "on"}]
    return answer.cached_tokens


def test_only_node_serves_its_agent_after_each_restart(tmp_path, model):
    messages = [{"role": "user", "content": "hello there"}]
    with local_fabric(tmp_path, model, "only") as fabric:
        talk(fabric, messages)
        reused = []
        for _ in range(RESTARTS):
            fabric.restart("only")
            reused += [talk(fabric, messages), talk(fabric, messages)]

    assert all(reused), reused
    assert reused == sorted(reused), "a turn reused less than the turn before"


@pytest.mark.usefixtures("same_port")
def test_restart_at_the_same_port_reuses_no_dead_connection(tmp_path, model):
    messages = [{"role": "user", "content": "hello there"}]
    with local_fabric(tmp_path, model, "only") as fabric:
        talk(fabric, messages)
        reused, urls = [], {url(fabric)}
        for _ in range(RESTARTS):
            fabric.restart("only")
            urls.add(url(fabric))
            reused.append(talk(fabric, messages))

    assert len(urls) == 1, "a process had another port"
    assert all(reused), reused


def test_restart_under_the_same_number_is_noticed_by_turns(tmp_path, model, monkeypatch):
    monkeypatch.setattr(services, "_incarnations", itertools.repeat(1))
    with local_fabric(tmp_path, model, "only") as fabric:
        for n in range(RESTARTS):
            fabric.restart("only")  # the new process's first view has the number of the old one's
            messages = [{"role": "user", "content": f"hello there, {n}"}]
            until_answered(lambda messages=messages: talk(fabric, messages))


def until_answered(turn):
    """Repeat a new agent's turn until a node accepts it: turns of new agents do not wait."""
    for _ in range(TRIES):
        with suppress(openai.InternalServerError):
            turn()
            return
        time.sleep(0.1)
    pytest.fail("the router keeps the dead address")


def url(fabric):
    return fabric.services["only"].node.resources.endpoint.url


@pytest.mark.slow
def test_turn_right_after_a_crash_reaches_the_new_process(tmp_path, model):
    messages = [{"role": "user", "content": "hello there"}]
    with process_fabric(tmp_path, model, "only") as fabric:
        talk(fabric, messages)
        reused = []
        for _ in range(RESTARTS):
            fabric.kill("only")
            fabric.revive("only")  # before the first heartbeat of the new process
            reused.append(talk(fabric, messages))

    assert all(reused), reused
