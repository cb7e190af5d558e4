"""Conversations edited before they reach real nodes, by the SDKs, on the recall model."""

from collections.abc import Iterator
from itertools import pairwise

import anthropic
import pytest

from router.policies.clear_tool_uses import CLEARED
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.samples import sample

FACT = "The vault code of Mira is otter lantern quartz."
ASK = "The vault code of Mira is"
SECRET = f"{FACT} " + "Nothing else is of any note in this part of it. " * 8
FILLER = "Nothing of note is written here, and nothing is to be kept in mind of it. " * 12
TOOL = {"name": "read", "input_schema": {"type": "object"}}
BETA = {"betas": ["context-management-2025-06-27"]}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "only") as instance:
        yield instance


@pytest.fixture(scope="module")
def client(fabric: LocalFabric) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def loop(*results: str) -> list:
    """Return a conversation with one task, and one tool call for each result."""
    messages = [{"role": "user", "content": "Read what there is."}]
    for n, text in enumerate(results):
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": "read", "input": {"part": n}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": text}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return messages


def request_body(messages: list, *edits: dict, **more) -> dict:
    managed = {"context_management": {"edits": list(edits)}} if edits else {}
    return {
        "model": "recall",
        "messages": [*messages, {"role": "user", "content": ASK}],
        "system": "You remember what you are told.",
        "tools": [TOOL],
        **BETA,
        **managed,
        **more,
    }


def clearing(keep: int) -> dict:
    return {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": keep},
    }


def answer_text(raw) -> str:
    return "".join(b.text for b in raw.parse().content if b.type == "text").strip()


def create(client, *args, headers=None, **more):
    return client.beta.messages.with_raw_response.create(
        **request_body(*args, max_tokens=24, extra_body={"temperature": 0}, **more),
        extra_headers=headers or {},
    )


def test_cleared_result_is_forgotten_and_counted_by_model_tokenizer(client):
    messages = loop(SECRET, FILLER, FILLER)
    whole = create(client, messages)
    cleared = create(client, messages, clearing(2))
    counted = client.beta.messages.count_tokens(**request_body(messages, clearing(2)))
    text_of = client.beta.messages.count_tokens(**request_body(loop(CLEARED, FILLER, FILLER)))

    assert answer_text(whole).startswith("otter lantern quartz")
    assert not answer_text(cleared).startswith("otter lantern quartz")
    (applied,) = cleared.parse().context_management.applied_edits
    assert applied.cleared_tool_uses == 1
    original = counted.context_management.original_input_tokens
    assert applied.cleared_input_tokens == original - counted.input_tokens > 0
    assert counted.input_tokens == text_of.input_tokens
    usage = cleared.parse().usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("edits", sample(["exact", "amortize"], "amortize"))
def test_edit_mode_decides_between_kept_and_recomputed_suffix(client, edits):
    """The mode decides how much is recomputed; the messages are the same."""
    agent = {"X-Agent-ID": f"crew-{edits}", "X-Macfabric-Edits": edits}
    system = f"You are {edits}, and remember what you are told."  # shares no prefix with others
    messages = loop(SECRET, FILLER, FILLER)
    before = create(client, messages, headers=agent, system=system)
    after = create(client, messages, clearing(2), headers=agent, system=system)

    assert answer_text(before).startswith("otter lantern quartz")
    assert after.headers["x-macfabric-policies"] == "clear_tool_uses_20250919=1"
    usage = after.parse().usage
    tokens = usage.input_tokens + usage.cache_read_input_tokens
    read = int(after.headers["x-macfabric-cached-tokens"])
    if edits == "amortize":
        assert after.headers["x-macfabric-match"] == "edit"
        assert int(after.headers["x-macfabric-amortized-tokens"]) > tokens // 2
        assert read > tokens * 3 // 4
    else:
        assert after.headers["x-macfabric-match"] == "diverge"
        assert read < tokens // 4
        assert not answer_text(after).startswith("otter lantern quartz")


def test_turns_between_truncation_strides_extend_the_cache(client):
    policy = {"name": "truncate_older_than", "options": {"n": 1, "max_chars": 100, "every": 3}}
    headers = {"X-Agent-ID": "strider"}
    messages, cached, counts = loop(FACT), [], []
    for n in range(1, 8):
        body = {"macfabric": {"policies": [policy]}, "temperature": 0}
        raw = client.beta.messages.with_raw_response.create(
            **request_body(messages, max_tokens=2) | {"messages": messages},
            extra_body=body,
            extra_headers=headers,
        )
        cached.append(int(raw.headers["x-macfabric-cached-tokens"]))
        counts.append(raw.headers["x-macfabric-policies"].partition("=")[2])
        messages = loop(FACT, *[FILLER] * n)

    assert counts == ["0", "0", "0", "2", "2", "2", "5"], "the fact is short and must be kept"
    grows = [later > earlier for earlier, later in pairwise(cached)]
    assert grows == [True, True, False, True, True, False]
