"""Continued answers through both official SDKs, warm afterwards."""

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
BEGUN = {"role": "assistant", "content": " otter lantern"}
REST = " quartz violin."
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "only") as made:
        yield made


@pytest.fixture(scope="module")
def client(fabric):
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked", [CONTINUE, {"continue_final_message": True}, {"add_generation_prompt": False}], ids=str
)
def test_a_chat_goes_on_with_its_last_message_where_it_is_asked_to(fabric, stream, asked):
    answer = fabric.chat([*USER, BEGUN], stream=stream, extra_body=asked)
    assert answer.text == REST


def test_a_message_may_say_itself_that_it_is_begun(fabric):
    answer = fabric.chat([*USER, {**BEGUN, "prefix": True}])
    assert answer.text == REST


def test_otherwise_it_is_answered(fabric):
    answer = fabric.chat([*USER, BEGUN])
    assert answer.prompt_tokens > fabric.chat([*USER, BEGUN], extra_body=CONTINUE).prompt_tokens


def test_an_answer_that_was_cut_is_gone_on_with_and_the_next_turn_is_warm(fabric):
    cut = fabric.chat(USER, max_tokens=2)
    assert cut.finish_reason == "length"
    begun = {"role": "assistant", "content": cut.text}
    rest = fabric.chat([*USER, begun], extra_body=CONTINUE)
    assert (cut.text + rest.text).endswith(REST)
    assert rest.agent == cut.agent
    assert rest.cached_tokens >= cut.prompt_tokens
    whole = {"role": "assistant", "content": cut.text + rest.text}
    last = fabric.chat([*USER, whole, {"role": "user", "content": ASK}])
    assert (last.agent, last.match) == (cut.agent, "extend")
    assert last.cached_tokens >= rest.prompt_tokens


def test_anthropics_dialect_always_goes_on(client):
    asked = {
        "model": "recall",
        "max_tokens": 32,
        "system": USER[0]["content"],
        "messages": [*USER[1:], BEGUN],
        "extra_body": {"temperature": 0},
    }
    made = client.messages.create(**asked)
    assert [block.text for block in made.content] == [REST]
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == REST
    counted = client.messages.count_tokens(
        model="recall", system=asked["system"], messages=asked["messages"]
    )
    usage = made.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    asked["messages"] = [
        *USER[1:],
        {"role": "assistant", "content": BEGUN["content"] + REST},
        {"role": "user", "content": ASK},
    ]
    again = client.messages.create(**asked)
    assert again.usage.cache_read_input_tokens >= counted.input_tokens


def test_an_empty_answer_is_none(client, fabric):
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
    "both": ([*USER, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}),
    "no answer": (USER, {"continue_final_message": True}),
    "no answer either": (USER, {"add_generation_prompt": False}),
    "a question": ([{**USER[1], "prefix": True}], {}),
    "calls": ([*USER, CALLS], CONTINUE),
    "a format": ([*USER, BEGUN], {**CONTINUE, "response_format": FORMAT}),
    "no flag": ([*USER, BEGUN], {"continue_final_message": "yes"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(fabric, name):
    messages, more = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.chat(messages, extra_body=more)
    assert caught.value.param
    assert json.dumps(caught.value.body)
