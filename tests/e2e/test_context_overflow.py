"""Loops of tools that outgrow the context of a real node: truncated, and warm in most turns."""

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
    with local_fabric(folder, "recall", "only", context_tokens_max=CONTEXT) as made:
        yield made


def steps(count: int) -> list:
    said = [
        {"role": "system", "content": "You read what there is."},
        {"role": "user", "content": "Read it all."},
    ]
    for n in range(count):
        call = {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"part": {n}}}'},
        }
        said += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}: {RESULT}"},
        ]
    return said


def asked(fabric: LocalFabric, count: int, **more):
    body = {"model": "recall", "messages": steps(count), "tools": [TOOL], "max_tokens": 4, **more}
    headers = {"X-Agent-ID": "loop"}
    return fabric.http.post("/v1/chat/completions", json=body, headers=headers)


def test_an_overflowing_loop_is_truncated_and_stays_warm(fabric: LocalFabric):
    auto = {"macfabric": {"truncation": "auto"}}
    first = next(n for n in range(1, 200) if asked(fabric, n).status_code == 400)
    assert "context" in asked(fabric, first).text
    dropped, cached, prompts, cold = [], 0, 0, 0
    for n in range(first, first + TURNS):
        answer = asked(fabric, n, **auto)
        assert answer.status_code == 200, answer.text
        dropped.append(int(answer.headers["x-macfabric-policies"].removeprefix("truncation=")))
        usage = answer.json()["usage"]
        now = usage["prompt_tokens_details"]["cached_tokens"]
        cached, prompts = cached + now, prompts + usage["prompt_tokens"]
        cold += now < usage["prompt_tokens"] // 2
        assert usage["prompt_tokens"] < CONTEXT
    cuts = sum(before != after for before, after in pairwise(dropped))
    assert dropped == sorted(dropped)
    assert cuts >= 2, "it was cut again and again"
    assert cold <= cuts + 1
    assert cold <= TURNS // 2
    assert cached > prompts // 2, f"{cached} of {prompts} tokens"
