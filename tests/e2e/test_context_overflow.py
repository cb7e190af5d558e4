"""Prompts that outgrow the context of a real node: truncated, and warm in most turns."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.support.local_fabric import LocalFabric, local_fabric

TURNS = 20  # over the context
CONTEXT = 2_048
RESULT = "Nothing of note is written in this part, and nothing is to be kept in mind of it. "
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "only", context_tokens_max=CONTEXT) as instance:
        yield instance


def steps(count: int) -> list:
    messages = [
        {"role": "system", "content": "You read what there is."},
        {"role": "user", "content": "Read it all."},
    ]
    for n in range(count):
        call = {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"part": {n}}}'},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}: {RESULT}"},
        ]
    return messages


def post_steps(fabric: LocalFabric, count: int, **more):
    body = {"model": "recall", "messages": steps(count), "tools": [TOOL], "max_tokens": 4, **more}
    headers = {"X-Agent-ID": "loop"}
    return fabric.http.post("/v1/chat/completions", json=body, headers=headers)


def test_overflowing_tool_loop_is_truncated_and_stays_warm(fabric: LocalFabric):
    auto = {"macfabric": {"truncation": "auto"}}
    first = next(n for n in range(1, 200) if post_steps(fabric, n).status_code == 400)
    assert "context" in post_steps(fabric, first).text
    dropped, cached, prompts, cold = [], 0, 0, 0
    for n in range(first, first + TURNS):
        answer = post_steps(fabric, n, **auto)
        assert answer.status_code == 200, answer.text
        dropped.append(int(answer.headers["x-macfabric-policies"].removeprefix("truncation=")))
        usage = answer.json()["usage"]
        now = usage["prompt_tokens_details"]["cached_tokens"]
        cached, prompts = cached + now, prompts + usage["prompt_tokens"]
        cold += now < usage["prompt_tokens"] // 2
        assert usage["prompt_tokens"] < CONTEXT
    cuts = sum(before != after for before, after in pairwise(dropped))
    assert dropped == sorted(dropped)
    assert cuts >= 2, "prompts were not truncated repeatedly"
    assert cold <= cuts + 1
    assert cold <= TURNS // 2
    assert cached > prompts // 2, f"{cached} of {prompts} tokens"


def post_prompt(fabric: LocalFabric, prompt, **more):
    body = {"model": "recall", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return fabric.http.post("/v1/completions", json=body, headers={"X-Agent-ID": "writer"})


def test_overflowing_text_loses_its_start_and_stays_warm(fabric: LocalFabric):
    auto = {"macfabric": {"truncation": "auto"}}
    dropped, cold = [], 0
    line = "Nothing of note is written in this line of the log, as in the one before.\n"
    text = line * 100
    while post_prompt(fabric, text).status_code == 200:
        text += line * 10
    for number in range(TURNS):
        text += f"{number}: {line * 4}"
        answer = post_prompt(fabric, text, **auto)
        assert answer.status_code == 200, answer.text
        dropped.append(int(answer.headers["x-macfabric-policies"].removeprefix("truncation=")))
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] < CONTEXT
        cold += usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] // 2
    cuts = sum(before != after for before, after in pairwise(dropped))
    assert dropped[0] > 0
    assert dropped == sorted(dropped)
    assert cuts >= 2
    assert cold <= cuts + 1 <= TURNS // 2


def test_token_id_prompt_is_cut_at_its_start(fabric: LocalFabric):
    ids = [index % 500 + 300 for index in range(2 * CONTEXT)]
    refused = post_prompt(fabric, ids)
    answer = post_prompt(fabric, ids, macfabric={"truncation": "auto"})
    assert refused.status_code == 400
    assert "context" in refused.text
    assert answer.status_code == 200, answer.text
    dropped = int(answer.headers["x-macfabric-policies"].removeprefix("truncation="))
    assert answer.json()["usage"]["prompt_tokens"] == len(ids) - dropped
