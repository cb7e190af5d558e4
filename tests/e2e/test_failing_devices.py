"""Device failures while agents are edited and moved change no answer.

Each answer and each stored block equals that of an undisturbed run, and each client is answered
or asked to retry.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.support.agent_traffic import words
from tests.support.device_faults import failing_device, injecting
from tests.support.local_fabric import LocalFabric
from tests.support.tiny_models import ONE_LAYER, write_model

NODES = ("node-a", "node-b")
AGENTS = EXACT, AMORTIZE, UNEDITED = "exact", "amortize", "unedited"  # edit mode of each agent
ATTEMPTS_MAX = 60
INJECTIONS, INJECTIONS_NIGHTLY = 12, 500
OPERATIONS_BETWEEN_MAX = 12
HOT_BYTES = 3 << 20  # fewer than three agents need, so that restores occur
RETRY_S = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "tiny", ONE_LAYER, seed=10))


@dataclass(frozen=True)
class Talk:
    """Messages and answers of an agent; the last turn follows the edit."""

    messages: list
    answers: list
    amortized_tokens: int  # of the last turn


class Client:
    """Client of one agent's conversation, which retries refused turns."""

    def __init__(self, fabric, agent, run, edits=None):
        self.fabric, self.agent, self.id = fabric, agent, f"{agent}-{run}"
        self.edits = edits or agent
        self.refused_count = 0

    def converse(self):
        """Take turns and move the agent, edit its first message, and take another turn."""
        messages = [{"role": "system", "content": f"You are {self.agent}. " + words(1, 40)}]
        answers = []
        for number in range(3):
            messages.append({"role": "user", "content": words(10 + number, 60)})
            answers.append(self.ask(messages)[0])
            messages.append({"role": "assistant", "content": answers[-1]})
            self.move(NODES[number % 2])
        if self.agent != UNEDITED:
            messages[1] = {"role": "user", "content": "[cleared]"}
        messages.append({"role": "user", "content": words(40, 12)})
        last, amortized_tokens = self.ask(messages)
        return Talk(messages, [*answers, last], amortized_tokens)

    def ask(self, messages):
        """Return the answer, and the number of tokens kept behind a change."""
        headers = {} if self.edits == UNEDITED else {"X-Macfabric-Edits": self.edits}
        body = {"model": self.fabric.model_name, "messages": messages, "max_tokens": 12}
        response = self._send(
            "/v1/chat/completions", body | {"temperature": 0}, {"X-Agent-ID": self.id} | headers
        )
        text = response.json()["choices"][0]["message"]["content"]
        return text, int(response.headers.get("x-macfabric-amortized-tokens", 0))

    def move(self, to):
        self._send(f"/v1/agents/{self.id}/migrate", {"to": to}, {})

    def _send(self, path, body, headers):
        for _ in range(ATTEMPTS_MAX):
            response = self.fabric.http.post(path, json=body, headers=headers)
            if response.status_code == 200:
                return response
            assert response.status_code == 503, response.text
            assert "retry-after" in response.headers, response.text
            self.refused_count += 1
            threading.Event().wait(RETRY_S)
        return pytest.fail(f"{ATTEMPTS_MAX} attempts failed: {response.text}")


@contextmanager
def fabric_of(folder, model, *, launch_waits=True):
    fabric = LocalFabric(folder, model, list(NODES), exact_chunks=True, hot_bytes=HOT_BYTES)
    try:
        for service in fabric.services.values():
            service.node.resources.engine.engine.launch_waits = launch_waits
        yield fabric
    finally:
        fabric.stop()


def converse_all(fabric, run):
    """Run all conversations at once; return them, and the number of retries."""
    clients = [Client(fabric, agent, run) for agent in AGENTS]
    with ThreadPoolExecutor(len(clients)) as threads:
        talks = dict(zip(AGENTS, threads.map(Client.converse, clients), strict=True))
    return talks, sum(client.refused_count for client in clients)


def stored_in(folder):
    """Map each stored block's name to its checksums."""
    found = {}
    for path in folder.rglob("blocks/*"):
        block_hash, checksum = path.name.split("-")
        found.setdefault(block_hash, set()).add(checksum)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model):
    """Return the talks, the amortized agent's last answer from exact memory, and stored blocks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with fabric_of(folder, model) as fabric:
        talks, refused_count = converse_all(fabric, "undisturbed")
        assert refused_count == 0
        exact, _ = Client(fabric, "anew", "x", EXACT).ask(talks[AMORTIZE].messages)
    assert exact != talks[AMORTIZE].answers[-1], "the model answers alike from both memories"
    return talks, exact, stored_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("launch_waits", [False, True], ids=["prepared early", "waiting"])
@pytest.mark.parametrize(
    "count", [INJECTIONS, pytest.param(INJECTIONS_NIGHTLY, marks=pytest.mark.nightly)]
)
def test_edited_and_moved_agents_answer_correctly_despite_device_failures(
    tmp_path, model, undisturbed, launch_waits, count
):
    rng, (talks, exact, blocks) = random.Random(count), undisturbed
    runs, refused_count, amortized_count = 0, 0, 0
    with fabric_of(tmp_path, model, launch_waits=launch_waits) as fabric, ExitStack() as failing:
        faults = [
            failing.enter_context(failing_device(service.node.resources.engine))
            for service in fabric.services.values()
        ]
        while sum(each.raised_count for each in faults) < count:
            with injecting(faults, rng, count, OPERATIONS_BETWEEN_MAX):
                held, refused = converse_all(fabric, runs)
            runs, refused_count = runs + 1, refused_count + refused
            for agent, talk in held.items():
                expected = talks[agent].answers
                if agent == AMORTIZE and not talk.amortized_tokens:  # the kept cache was lost
                    expected = [*expected[:-1], exact]
                elif agent == AMORTIZE:
                    amortized_count += 1
                assert (agent, talk.answers) == (agent, expected)
    assert refused_count > 0
    assert amortized_count > 0
    stored = stored_in(tmp_path)
    assert stored.keys() & blocks.keys()
    assert {name for name, sums in stored.items() if not sums <= blocks.get(name, sums)} == set()
