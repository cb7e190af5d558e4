"""A tenant at a router with a real node: many requests at once, and an abandoned one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2
import openai
import pytest

from node.mlx.engine import Engine
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.samples import sample
from tests.support.waiting import wait_until

ALICE, BOB = "key-of-alice-0123456789", "key-of-bob-0123456789"
STEP_S = 0.02
ACTIVE, PLACES = 2, 4
CROWD = 12
ANSWER_TOKENS = 100
HANG_S = 60.0
USER = {"role": "user", "content": "The vault code of Mira is"}
LIST = " ".join(f"item{number}" for number in range(200))
MESSAGES = [
    {"role": "user", "content": f"The list of Mira is {LIST}."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "The list of Mira is"},
]


@pytest.fixture
def fabric(tmp_path, monkeypatch) -> Iterator[LocalFabric]:
    """Run a slow node that serves two requests at a time and queues four."""
    launch = Engine.launch

    def slowed(*arguments):
        time.sleep(STEP_S)
        return launch(*arguments)

    monkeypatch.setattr(Engine, "launch", slowed)
    keys = {"alice": ALICE, "bob": BOB}
    limits = {"active_max": ACTIVE, "waiting_max": PLACES}
    with local_fabric(tmp_path, "recall", "only", api_keys=keys, **limits) as instance:
        yield instance


def client(fabric, key, **options):
    return openai.OpenAI(base_url=f"{fabric.url}/v1", api_key=key, **options)


def ask(of, agent, tokens=ANSWER_TOKENS):
    return of.chat.completions.create(
        model="recall",
        messages=[USER],
        max_tokens=tokens,
        extra_headers={"X-Agent-ID": agent},
        extra_body={"ignore_eos": True},
    )


def test_tenant_over_its_share_gets_429_and_others_are_served(fabric):
    refused, done = [], []
    with client(fabric, BOB, max_retries=0) as bob, client(fabric, ALICE, max_retries=0) as alice:

        def crowd(number):
            try:
                done.append(ask(bob, f"bob-{number}"))
            except openai.RateLimitError as error:
                refused.append(error)

        with ThreadPoolExecutor(CROWD) as threads:
            asking = [threads.submit(crowd, number) for number in range(CROWD)]
            wait_until(
                lambda: refused and fabric.services["only"].node.resources.engine.waiting_count
            )
            served = ask(alice, "mira", 2)
            are_left = not all(each.done() for each in asking)
        again = ask(bob, "bob-again", 2)

    assert served.usage.completion_tokens == 2
    assert are_left, "alice waited for all of bob's requests"
    assert len(done) + len(refused) == CROWD
    assert len(refused) >= CROWD - PLACES - ACTIVE
    for error in refused:
        body = error.response.json()["error"]
        assert int(error.response.headers["retry-after"]) >= 1
        assert (body["type"], body["code"]) == ("rate_limit_error", "overloaded")
        assert "Retry-After" in body["message"]
    assert again.usage.completion_tokens == 2


@pytest.mark.parametrize("way", sample(["close", "cancel"], "close"))
def test_disconnect_mid_stream_ends_turn_on_node(fabric, way):
    node = fabric.services["only"].node
    body = {"model": "recall", "messages": MESSAGES, "max_tokens": 2_000, "stream": True}
    headers = {"authorization": f"Bearer {BOB}", "x-agent-id": way}
    url = f"{fabric.url}/v1/chat/completions"
    http = httpx2.Client(timeout=HANG_S, headers=headers)
    with suppress(httpx2.StreamClosed, httpx2.ReadError):
        with http.stream("POST", url, json=body | {"ignore_eos": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            [turn] = node.live_turns
            sequence = turn._sequence
            shown = len(sequence.answer_ids)
            if way == "close":
                http.close()  # the connection, in the middle of the answer
        http.close()
    wait_until(lambda: not node.live_turns)

    assert len(sequence.answer_ids) - shown <= 2.0 / STEP_S, "the whole answer was generated"
    assert node.resources.engine.budget.reserved_bytes == 0
