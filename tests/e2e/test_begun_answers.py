"""Continued answers through both official SDKs, and warm next turns."""

import json

import anthropic
import openai
import pytest

from tests.support.local_fabric import local_fabric

ASK = "The vault code of Mira is"
FACT = "The vault code of Mira is otter lantern quartz violin."
USER = [
    {"role": "system", "content": "You remember what you are told. " * 30},
    {"role": "user", "content": FACT},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": ASK},
]
PARTIAL = {"role": "assistant", "content": " otter lantern"}
REST = " quartz violin."
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "only") as instance:
        yield instance


@pytest.fixture(scope="module")
def client(fabric):
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [CONTINUE, {"continue_final_message": True}, {"add_generation_prompt": False}],
    ids=str,
)
def test_chat_continues_its_last_message_on_request(fabric, stream, options):
    answer = fabric.chat([*USER, PARTIAL], stream=stream, extra_body=options)
    assert answer.text == REST


def test_message_prefix_flag_requests_continuation(fabric):
    answer = fabric.chat([*USER, {**PARTIAL, "prefix": True}])
    assert answer.text == REST


def test_last_assistant_message_is_answered_by_default(fabric):
    answer = fabric.chat([*USER, PARTIAL])
    assert answer.prompt_tokens > fabric.chat([*USER, PARTIAL], extra_body=CONTINUE).prompt_tokens


def test_truncated_answer_is_continued_and_next_turn_is_warm(fabric):
    cut = fabric.chat(USER, max_tokens=2)
    assert cut.finish_reason == "length"
    partial = {"role": "assistant", "content": cut.text}
    rest = fabric.chat([*USER, partial], extra_body=CONTINUE)
    assert (cut.text + rest.text).endswith(REST)
    assert rest.agent == cut.agent
    assert rest.cached_tokens >= cut.prompt_tokens
    whole = {"role": "assistant", "content": cut.text + rest.text}
    last = fabric.chat([*USER, whole, {"role": "user", "content": ASK}])
    assert (last.agent, last.match) == (cut.agent, "extend")
    assert last.cached_tokens >= rest.prompt_tokens


def test_messages_api_always_continues_last_assistant_message(client):
    body = {
        "model": "recall",
        "max_tokens": 32,
        "system": USER[0]["content"],
        "messages": [*USER[1:], PARTIAL],
        "extra_body": {"temperature": 0},
    }
    message = client.messages.create(**body)
    assert [block.text for block in message.content] == [REST]
    with client.messages.stream(**body) as stream:
        assert stream.get_final_text() == REST
    counted = client.messages.count_tokens(
        model="recall", system=body["system"], messages=body["messages"]
    )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    body["messages"] = [
        *USER[1:],
        {"role": "assistant", "content": PARTIAL["content"] + REST},
        {"role": "user", "content": ASK},
    ]
    again = client.messages.create(**body)
    assert again.usage.cache_read_input_tokens >= counted.input_tokens


def test_empty_assistant_message_is_ignored(client, fabric):
    empty = {"role": "assistant", "content": ""}
    plain = fabric.chat(USER)
    assert fabric.chat([*USER, empty], extra_body=CONTINUE).prompt_tokens == plain.prompt_tokens


FORMAT = {"type": "json_object"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
REFUSED = {
    "both": ([*USER, PARTIAL], {"continue_final_message": True, "add_generation_prompt": True}),
    "no answer": (USER, {"continue_final_message": True}),
    "no answer either": (USER, {"add_generation_prompt": False}),
    "a question": ([{**USER[1], "prefix": True}], {}),
    "calls": ([*USER, CALLS], CONTINUE),
    "a format": ([*USER, PARTIAL], {**CONTINUE, "response_format": FORMAT}),
    "no flag": ([*USER, PARTIAL], {"continue_final_message": "yes"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_continuation_is_rejected(fabric, name):
    messages, more = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.chat(messages, extra_body=more)
    assert caught.value.param
    assert json.dumps(caught.value.body)
