"""Answers that outgrow a node's memory at a real `macfabric up` wait, and none is truncated.

Three answers of five blocks each are generated at once with memory for six blocks.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import openai
import pytest

from fabric.limits import BLOCK_TOKENS
from node.mlx.loaded_model import load_model
from tests.support.fabric_process import ALICE
from tests.support.up_fabric import Up, running_up

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cluster,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Ray's processes"),
]
BLOCKS, ANSWER_TOKENS = 6, 4 * BLOCK_TOKENS
BACKGROUND, INTERACTIVE = ("ann", "bob"), "carl"
HANDED_OVER = "its turn continues on its new node"
HANG_S = 300.0


def conversation(name: str) -> list[dict[str, str]]:
    items_text = " ".join(f"{name}{number}" for number in range(40))
    return [
        {"role": "user", "content": f"The list of {name} is {items_text}."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": f"The list of {name} is"},
    ]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[Up]:
    budget_bytes = load_model("recall").spec.resident_bytes(BLOCKS * BLOCK_TOKENS)
    with running_up(tmp_path_factory.mktemp("fabric"), node={"hot_bytes": budget_bytes}) as up:
        yield up


@pytest.fixture
def client(fabric) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{fabric.url}/v1", api_key=ALICE, max_retries=0, timeout=HANG_S
    ) as sdk:
        yield sdk


def stream_answer(client: openai.OpenAI, name: str, agent: str, has_begun: Event) -> str:
    """Stream a long answer to its end."""
    text, reason, tokens = "", None, 0
    for chunk in client.chat.completions.create(
        model="recall",
        messages=conversation(name),
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Agent-ID": agent},
        extra_body={
            "ignore_eos": True,
            "service_tier": "flex" if name in BACKGROUND else "default",
        },
    ):
        has_begun.set()
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert (reason, tokens) == ("length", ANSWER_TOKENS)
    return text


def ask_more(client: openai.OpenAI, name: str) -> str:
    """Take another turn of an agent whose answer is still streaming."""
    partial = {"role": "assistant", "content": f"{name}0 {name}1"}
    answer = client.chat.completions.create(
        model="recall",
        messages=[*conversation(name), partial, *conversation(name)[2:]],
        max_tokens=16,
        temperature=0,
        extra_headers={"X-Agent-ID": name},
    )
    return answer.choices[0].message.content or ""


def handover_count(fabric: Up) -> int:
    return (fabric.data / "logs" / "router.log").read_text().count(HANDED_OVER)


def test_background_turn_is_preempted_and_resumes_unchanged(fabric, client):
    names = (*BACKGROUND, INTERACTIVE)
    alone = {name: stream_answer(client, name, f"{name}-alone", Event()) for name in names}
    assert handover_count(fabric) == 0
    begun = {name: Event() for name in names}
    with ThreadPoolExecutor(len(names) + len(BACKGROUND)) as threads:
        answers = {
            name: threads.submit(stream_answer, client, name, name, begun[name])
            for name in BACKGROUND
        }
        for name in BACKGROUND:
            assert begun[name].wait(HANG_S)
        answers[INTERACTIVE] = threads.submit(
            stream_answer, client, INTERACTIVE, INTERACTIVE, begun[INTERACTIVE]
        )
        further = [threads.submit(ask_more, client, name) for name in BACKGROUND]
        together = {name: answer.result(HANG_S) for name, answer in answers.items()}
        for name, answer in zip(BACKGROUND, further, strict=True):
            assert answer.result(HANG_S).strip().startswith(f"{name}0 {name}1")

    assert together == alone
    assert handover_count(fabric) > 0
