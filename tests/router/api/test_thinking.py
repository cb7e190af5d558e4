"""Thinking limits, in every dialect and spelling."""

import pytest

from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.generation import Sampling, ThoughtLimit
from router.admin.generate import GENERATE_BODY
from router.anthropic.request import parse_request
from router.openai.chat_request import parse_chat
from router.openai.responses.request import parse_responses

USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": USER}
RESPONSE = {"model": "m", "input": "hi"}
MESSAGE = {"model": "m", "messages": USER, "max_tokens": 99}


def read(parse, body):
    """Return the thinking limit and the template's options."""
    request = parse({}, body)
    return request.sampling.thoughts, request.prompt.template_options


def chat(**more):
    return read(parse_chat, CHAT | more)


def response(**more):
    return read(parse_responses, RESPONSE | more)


def message(**more):
    return read(parse_request, MESSAGE | more)


def generate(**more):
    body = GENERATE_BODY.read({"messages": USER} | more)
    return body.sampling().thoughts, body.prompt().template_options


OPENAI = (chat, response)
EVERY = (*OPENAI, message, generate)


@pytest.mark.parametrize("ask", EVERY)
def test_request_without_fields_has_no_thinking_limit(ask):
    assert ask()[0] is None


@pytest.mark.parametrize("ask", OPENAI)
@pytest.mark.parametrize(
    "name",
    [
        "thinking_budget",
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
    ],
)
@pytest.mark.parametrize(("value", "tokens"), [(0, 0), (64, 64), ("64", 64), (64.0, 64)])
def test_budget_fields_of_other_servers_are_read(ask, name, value, tokens):
    limit, options = ask(**{name: value})
    assert limit == ThoughtLimit(tokens)
    assert options["thinking_budget"] == tokens  # for templates that state it


@pytest.mark.parametrize("ask", [*OPENAI, generate])
def test_budget_of_minus_one_means_unlimited(ask):
    limit, options = ask(thinking_budget=-1)
    assert limit == ThoughtLimit(COMPLETION_TOKENS_MAX)
    assert "thinking_budget" not in options


@pytest.mark.parametrize("ask", OPENAI)
def test_openrouter_reasoning_budget_is_read(ask):
    assert ask(reasoning={"max_tokens": 7})[0] == ThoughtLimit(7)
    assert ask(reasoning={"max_tokens": 7, "effort": "low"})[0] == ThoughtLimit(7, "low")
    assert ask(reasoning={"max_tokens": 7}, thinking_budget=9)[0] == ThoughtLimit(9)


def test_chat_reasoning_object_disables_or_sets_effort():
    limit, options = chat(reasoning={"enabled": False})
    assert limit == ThoughtLimit(effort="none")
    assert options["enable_thinking"] is False
    assert chat(reasoning={"effort": "high"})[0] == ThoughtLimit(effort="high")
    assert chat(reasoning={"effort": "high"}, reasoning_effort="low")[0].effort == "low"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_effort_reaches_node_unchanged(effort):
    """The node maps efforts to tokens; the template gets the nearest effort that it supports."""
    for limit, options in (
        chat(reasoning_effort=effort),
        response(reasoning={"effort": effort}),
        generate(reasoning_effort=effort),
    ):
        assert limit == ThoughtLimit(effort=effort)
        assert options["reasoning_effort"] in {"low", "medium", "high"}
        assert "thinking_budget" not in options


def test_messages_api_reads_budget_effort_and_disabled():
    limit, options = message(thinking={"type": "enabled", "budget_tokens": 2_000})
    assert (limit, options["thinking_budget"]) == (ThoughtLimit(2_000), 2_000)
    assert message(thinking={"type": "disabled"})[0] == ThoughtLimit(0)
    assert message(thinking={"type": "adaptive"})[0] is None
    low = {"effort": "low"}
    assert message(thinking={"type": "adaptive"}, output_config=low)[0] == ThoughtLimit(None, "low")
    request = parse_request({}, MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 5}})
    assert not request.ignored


def test_explicit_template_option_wins_over_budget():
    _, options = chat(chat_template_kwargs={"thinking_budget": 5}, thinking_budget=9)
    assert options["thinking_budget"] == 5


@pytest.mark.parametrize("value", [-2, "many", [1], True, 1.5, {}])
def test_invalid_budget_is_rejected_with_its_parameter(value):
    for ask in (chat, response, generate):
        with pytest.raises(RejectedError) as caught:
            ask(thinking_budget=value)
        assert caught.value.param == "thinking_budget"
    with pytest.raises(RejectedError) as caught:
        message(thinking={"type": "enabled", "budget_tokens": value})
    assert caught.value.param == "thinking.budget_tokens"


def test_unlimited_request_is_readable_by_older_nodes():
    assert "thoughts" not in parse_json(dump_json(Sampling()))
    sampling = Sampling(thoughts=ThoughtLimit(5, "low"))
    assert from_plain(Sampling, parse_json(dump_json(sampling))) == sampling
