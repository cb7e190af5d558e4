"""Sessions with pictures and hosted tools' blocks continue on real nodes, and stay warm."""

import base64

import pytest

from tests.support.local_fabric import LocalFabric, local_fabric

FACT = "The vault code of Mira is otter lantern quartz. " * 12
ASK = "The vault code of Mira is"
PIXELS = base64.b64encode(bytes(range(256)) * 64).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXELS}
URL = f"data:image/png;base64,{PIXELS}"
READ = {"name": "read_file", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "only") as instance:
        yield instance


def turn(fabric: LocalFabric, path, agent, **body):
    """Take one turn; return the answer's body and headers."""
    headers = {"x-agent-id": agent}
    sent = {"model": "recall", "temperature": 0, **body}
    answer = fabric.http.post(path, json=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.headers


def test_screenshot_in_tool_result_keeps_messages_session_warm(fabric):
    use = {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "shot.png"}}
    hosted = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Nothing."},
    ]
    image = {"type": "image", "source": SOURCE}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": FACT}, image]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [image]}]},
        {"role": "assistant", "content": hosted},
        {"role": "user", "content": ASK},
    ]  # fmt: skip
    more = {"max_tokens": 12, "tools": [SEARCH, READ]}
    listed = "image, server_tool_use, web_search_tool_result, web_search_20250305"
    first, headers = turn(fabric, "/v1/messages", "claude", messages=messages, **more)
    assert headers["x-macfabric-ignored"] == listed
    assert first["content"][0]["text"].strip().startswith("otter lantern quartz")
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [image]},
    ]
    second, headers = turn(fabric, "/v1/messages", "claude", messages=messages, **more)
    prompt = first["usage"]["input_tokens"]
    assert second["usage"]["cache_read_input_tokens"] >= prompt > 100
    assert headers["x-macfabric-match"] == "extend"


def test_image_in_chat_keeps_prefix_warm(fabric):
    picture = {"type": "image_url", "image_url": {"url": URL}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": FACT}, picture]},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": ASK},
    ]
    path = "/v1/chat/completions"
    first, headers = turn(fabric, path, "chat", messages=messages, max_tokens=12.0)
    answer_text = first["choices"][0]["message"]["content"]
    assert answer_text.strip().startswith("otter lantern quartz")
    assert headers["x-macfabric-ignored"] == "image_url"
    messages += [
        {"role": "assistant", "content": answer_text},
        {"role": "user", "content": [picture]},
    ]
    second, headers = turn(fabric, path, "chat", messages=messages, max_tokens=200_000, stop="z")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] > 100


def test_input_image_and_search_in_response_are_read_and_counted(fabric):
    items = [
        {"role": "user", "content": [
            {"type": "input_text", "text": FACT}, {"type": "input_image", "image_url": URL}]},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "assistant", "content": "Noted."},
        {"role": "user", "content": ASK},
    ]  # fmt: skip
    answer, headers = turn(fabric, "/v1/responses", "codex", input=items, max_output_tokens=12)
    assert answer["output"][-1]["content"][0]["text"].strip().startswith("otter lantern quartz")
    assert headers["x-macfabric-ignored"] == "input_image, web_search_call"
    counted, _ = turn(fabric, "/v1/responses/input_tokens", "codex", input=items)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_generate_accepts_image_in_existing_conversation(fabric):
    path = "/v1/agents/painter/generate"
    turn(fabric, path, "x", messages=[{"role": "user", "content": FACT}], max_tokens=1)
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": ASK}]
    messages = [{"role": "user", "content": parts}]
    answer, headers = turn(fabric, path, "x", messages=messages, max_tokens=12)
    assert answer["cached_tokens"] > 100
    assert headers["x-macfabric-ignored"] == "image_url"
