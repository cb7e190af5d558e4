"""Sampling fields that chats and completions share."""

import pytest

from fabric.errors import RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from router.admin.generate import GENERATE_BODY
from router.anthropic.request import parse_request
from router.openai.chat_request import parse_chat
from router.openai.completion_request import parse_completion
from router.openai.responses.request import parse_responses

PROMPTS = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_max_tokens_of_minus_one_and_empty_stop_mean_none(parse):
    def sampling(**fields):
        return parse({}, {"model": "m", **PROMPTS, **fields}).sampling

    assert sampling(max_tokens=-1).max_tokens == COMPLETION_TOKENS_MAX
    assert sampling(stop="").stop == sampling(stop=[""]).stop == ()
    assert sampling(stop=["a", ""]).stop == ("a",)


ALL = [parse_chat, parse_completion, parse_responses]


def read(parse, **fields):
    limit = "max_output_tokens" if parse is parse_responses else "max_tokens"
    fields = {limit if name == "max_tokens" else name: value for name, value in fields.items()}
    prompts = {"input": "hi"} if parse is parse_responses else PROMPTS
    return parse({}, {"model": "m", **prompts, **fields}).sampling


@pytest.mark.parametrize("parse", ALL)
def test_integers_may_be_sent_as_floats(parse):
    sampling = read(parse, max_tokens=64.0, seed=42.0, top_k=40.0)
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (64, 42, 40)
    assert all(type(n) is int for n in (sampling.max_tokens, sampling.seed, sampling.top_k))
    for field in ("max_tokens", "seed", "top_k"):
        with pytest.raises(RejectedError, match="expected an integer, got a number"):
            read(parse, **{field: 64.5})


@pytest.mark.parametrize("parse", ALL)
def test_numbers_may_be_sent_as_strings(parse):
    sampling = read(parse, max_tokens="64", seed="-7", temperature="0.5", top_p="1")
    assert (sampling.max_tokens, sampling.seed) == (64, -7)
    assert (sampling.temperature, sampling.top_p) == (0.5, 1.0)


@pytest.mark.parametrize("parse", ALL)
def test_max_tokens_is_capped(parse):
    for limit in (COMPLETION_TOKENS_MAX + 1, 200_000, 1 << 70, 1e9):
        assert read(parse, max_tokens=limit).max_tokens == COMPLETION_TOKENS_MAX


def test_anthropic_max_tokens_is_capped():
    body = {"model": "m", "max_tokens": 200_000.0, "messages": PROMPTS["messages"]}
    thinking = {"type": "enabled", "budget_tokens": 199_999}
    read = parse_request({}, {**body, "thinking": thinking})
    assert read.sampling.max_tokens == COMPLETION_TOKENS_MAX
    generate = GENERATE_BODY.read({"text": "x", "max_tokens": 200_000})
    assert generate.sampling().max_tokens == COMPLETION_TOKENS_MAX


def test_strict_may_be_sent_as_a_string():
    named = {"name": "x", "schema": {"type": "object"}}
    for word, is_strict in (("true", True), ("false", False), (True, True)):
        form = {"type": "json_schema", "json_schema": {**named, "strict": word}}
        assert read(parse_chat, response_format=form).output.is_strict is is_strict
        text = {"format": {"type": "json_schema", **named, "strict": word}}
        assert read(parse_responses, text=text).output.is_strict is is_strict
        tool = {"type": "function", "function": {"name": "f", "strict": word}}
        calls = parse_chat({}, {"model": "m", **PROMPTS, "tools": [tool]}).prompt.calls
        assert calls.strict == (("f",) if is_strict else ())
    with pytest.raises(RejectedError) as caught:
        read(parse_chat, response_format={"type": "json_schema", "json_schema": {"strict": "yes"}})
    assert caught.value.param == "response_format.json_schema.strict"
