import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import FabricError, RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.generation import Identity, IdentityKind, Priority
from fabric.turn.messages import Message, MessageRole
from router.limits import ANSWERS_PER_PROMPT_MAX
from router.openai.chat_request import parse_chat
from tests.support.conversations import template_messages

SMALLEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(headers=None, **fields):
    return parse_chat(headers or {}, {**SMALLEST, **fields})


def messages(*conversation):
    return template_messages(parse(messages=list(conversation)).prompt)


def test_smallest_request_has_openai_defaults():
    chat = parse()

    assert chat.model == "m"
    assert chat.sampling.temperature == 1.0
    assert chat.sampling.top_p == 1.0
    assert chat.sampling.max_tokens == COMPLETION_TOKENS_MAX
    assert chat.sampling.stop == ()
    assert chat.sampling.logprobs is None
    assert chat.identity == Identity(IdentityKind.CONTENT)
    assert not chat.stream
    assert chat.prompt.tools is None


def test_reasoning_is_read_from_any_field_name():
    assistant = {"role": "assistant", "content": "x"}
    for thought in (
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"reasoning_content": "hm", "reasoning": "other"},
    ):
        assert messages({**assistant, **thought})[0]["reasoning_content"] == "hm"
    for other in ({"reasoning": {"effort": "low"}}, {"thinking": True}):
        assert "reasoning_content" not in messages({**assistant, **other})[0]


def test_all_known_fields_are_read():
    chat = parse(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=-1,
        presence_penalty=1.5,
        seed=7,
        stop=["a", "b"],
        max_tokens=3,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"12": -100},
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        response_format={"type": "text"},
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        tool_choice="auto",
        parallel_tool_calls=True,
        made_up_field={"x": 1},
    )

    sampling = chat.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 3)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1.0, 1.5)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (7, ("a", "b"), 5)
    assert (sampling.logprobs, sampling.logit_bias) == (4, {"12": -100.0})
    assert chat.stream
    assert chat.include_usage
    options = {"enable_thinking": False, "reasoning_effort": "low"}
    assert chat.prompt.template_options == options


REFUSED = [
    ("model", {"model": None}, "missing_required_parameter"),
    ("model", {"model": 3}, "invalid_type"),
    ("messages", {"messages": None}, "missing_required_parameter"),
    ("messages", {"messages": []}, "invalid_value"),
    ("messages", {"messages": "hi"}, "invalid_type"),
    ("messages", {"messages": [{"role": "user", "content": "x"}] * 10_001}, "invalid_value"),
    ("messages[0]", {"messages": ["hi"]}, "invalid_type"),
    ("messages[0].role", {"messages": [{"content": "x"}]}, "missing_required_parameter"),
    ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}, "unsupported_value"),
    ("messages[0].content", {"messages": [{"role": "user"}]}, "missing_required_parameter"),
    ("messages[0].content", {"messages": [{"role": "user", "content": 1}]}, "invalid_type"),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"image_url": {}}]}]},
        "missing_required_parameter",
    ),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": 5}]}]},
        "invalid_type",
    ),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
    ),
    (
        "messages[0].tool_calls[0].function.name",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "missing_required_parameter",
    ),
    (
        "messages[0].function_call",
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "unsupported_parameter",
    ),
    ("temperature", {"temperature": "hot"}, "invalid_type"),
    ("temperature", {"temperature": True}, "invalid_type"),
    ("temperature", {"temperature": 2.5}, "invalid_value"),
    ("temperature", {"temperature": float("inf")}, "invalid_value"),
    ("temperature", {"temperature": 10**400}, "invalid_value"),
    ("top_p", {"top_p": -1}, "invalid_value"),
    ("top_k", {"top_k": 1.5}, "invalid_type"),
    ("seed", {"seed": 1 << 70}, "invalid_value"),
    ("n", {"n": ANSWERS_PER_PROMPT_MAX + 1}, "invalid_value"),
    ("best_of", {"best_of": 2}, "unsupported_parameter"),
    ("stop", {"stop": [1]}, "invalid_type"),
    ("stop", {"stop": ["x"] * 17}, "invalid_value"),
    ("stop", {"stop": "x" * 513}, "invalid_value"),
    ("max_tokens", {"max_tokens": 0}, "invalid_value"),
    ("max_tokens", {"max_tokens": -2}, "invalid_value"),
    ("max_tokens", {"max_tokens": 64.5}, "invalid_type"),
    ("max_tokens", {"max_tokens": float("inf")}, "invalid_type"),
    ("max_tokens", {"max_tokens": -(10.0**300)}, "invalid_value"),
    ("max_tokens", {"max_tokens": True}, "invalid_type"),
    ("max_completion_tokens", {"max_completion_tokens": "many"}, "invalid_type"),
    ("max_completion_tokens", {"max_completion_tokens": "6.5"}, "invalid_type"),
    ("seed", {"seed": "9" * 999}, "invalid_type"),
    ("temperature", {"temperature": "nan"}, "invalid_type"),
    ("top_p", {"top_p": "1.5"}, "invalid_value"),
    ("stream", {"stream": "yes"}, "invalid_type"),
    ("stream_options", {"stream_options": {"include_usage": True}}, "invalid_value"),
    ("top_logprobs", {"top_logprobs": 2}, "invalid_value"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "invalid_value"),
    ("logit_bias", {"logit_bias": {"x": 1}}, "invalid_value"),
    ("logit_bias", {"logit_bias": {"²": 1}}, "invalid_value"),
    ("logit_bias.1", {"logit_bias": {"1": 101}}, "invalid_value"),
    ("logit_bias", {"logit_bias": {str(i): 0 for i in range(1025)}}, "invalid_value"),
    ("tools", {"tools": {}}, "invalid_type"),
    (
        "tools[0].type",
        {"tools": [{"type": "functions", "function": {"name": "f"}}]},
        "unsupported_parameter",
    ),
    (
        "tool_choice",
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "invalid_value",
    ),
    (
        "tool_choice.type",
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "unsupported_parameter",
    ),
    (
        "tool_choice.tools",
        {
            "tools": [{"type": "web_search"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "web_search"}],
            },
        },
        "invalid_value",
    ),
    ("tools[0].function", {"tools": [{"type": "function"}]}, "missing_required_parameter"),
    (
        "tools[0].function.parameters",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "invalid_type",
    ),
    ("tool_choice", {"tool_choice": "required"}, "invalid_value"),
    ("tool_choice", {"tool_choice": 3}, "invalid_value"),
    ("functions", {"functions": []}, "unsupported_parameter"),
    ("modalities", {"modalities": ["audio"]}, "unsupported_parameter"),
    ("audio", {"audio": {"voice": "x"}}, "unsupported_parameter"),
    ("chat_template_kwargs", {"chat_template_kwargs": []}, "invalid_type"),
    *(
        (f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: 1}}, "invalid_value")
        for name in ("messages", "tools", "add_generation_prompt", "tokenize")
    ),
    *(
        (f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: "no"}}, "invalid_type")
        for name in ("restore_reasoning", "move_dates", "control_marks")
    ),
    (
        "chat_template_kwargs.chat_template",
        {"chat_template_kwargs": {"chat_template": "{% for %}"}},
        "invalid_value",
    ),
    ("user", {"user": 1}, "invalid_type"),
    ("user", {"user": "x" * 513}, "invalid_value"),
    ("prompt_cache_key", {"prompt_cache_key": []}, "invalid_type"),
    ("metadata", {"metadata": "x"}, "invalid_type"),
    ("metadata.agent_id", {"metadata": {"agent_id": 1}}, "invalid_type"),
    ("service_tier", {"service_tier": "batch"}, "invalid_value"),
    ("service_tier", {"service_tier": 1}, "invalid_type"),
    ("prompt_cache_retention", {"prompt_cache_retention": "9d"}, "invalid_value"),
]


@pytest.mark.parametrize(("param", "fields", "code"), REFUSED)
def test_invalid_field_is_rejected_with_its_parameter(param, fields, code):
    with pytest.raises(RejectedError) as caught:
        parse(**fields)

    assert caught.value.param == param
    assert caught.value.code == code
    assert param in caught.value.message
    assert caught.value.status == 400


def test_null_field_equals_absent_field():
    names = ["temperature", "top_p", "n", "stop", "stream", "seed", "tools", "tool_choice"]
    names += ["logprobs", "metadata", "user"]

    assert parse(**dict.fromkeys(names)).sampling == parse().sampling


def test_text_parts_are_joined_unchanged():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    (message,) = parse(messages=[{"role": "user", "content": parts}]).prompt.messages

    assert message == Message(MessageRole.USER, ("a ", "b"))
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a b"}]


def test_developer_role_becomes_system_with_fixed_key_order():
    one = messages({"content": "x", "name": "n", "role": "developer"})
    two = messages({"role": "system", "name": "n", "content": "x"})

    assert one == [{"role": "system", "content": "x", "name": "n"}]
    assert list(one[0]) == list(two[0])
    assert parse(messages=one).prompt.opening == parse(messages=two).prompt.opening


def test_tool_calls_and_results_are_read():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}
    call_message, result_message = messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    )

    assert call_message["content"] == ""
    assert call_message["tool_calls"][0]["id"] == "c1"
    assert list(call_message["tool_calls"][0]["function"]["arguments"].items()) == [
        ("b", 1),
        ("a", 2),
    ]
    assert result_message == {"role": "tool", "content": "42", "tool_call_id": "c1"}


@pytest.mark.parametrize("broken", ['{"a":', "[1]", '"x"', '{"a":1,"a":2}', "NaN"])
def test_non_object_arguments_stay_text(broken):
    call = {"function": {"name": "f", "arguments": broken}}
    (message,) = messages({"role": "assistant", "tool_calls": [call]})

    assert message["tool_calls"][0]["function"]["arguments"] == broken


def test_blank_arguments_become_an_empty_object():
    """Clients send these for functions without parameters."""
    call = {"function": {"name": "f", "arguments": " "}}
    (message,) = messages({"role": "assistant", "tool_calls": [call]})

    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_tool_choice_none_only_disables_call_parsing():
    tools = [{"type": "function", "function": {"name": "f"}}]

    assert parse(tools=tools).prompt.tools == tools
    assert parse(tools=tools).prompt.reads_calls
    without = parse(tools=tools, tool_choice="none").prompt
    assert (without.tools, without.reads_calls) == (tools, False)
    assert without.sketch == parse(tools=tools).prompt.sketch
    assert parse(tools=[]).prompt.tools is None


IDENTITIES = [
    ({"x-agent-id": "alice"}, {"user": "bob"}, IdentityKind.AGENT, "alice"),
    ({}, {"prompt_cache_key": "k", "user": "bob"}, IdentityKind.GROUP, "k"),
    ({}, {"metadata": {"agent_id": "a", "user_id": "u"}, "user": "b"}, IdentityKind.GROUP, "a"),
    ({}, {"metadata": {"user_id": "u"}, "user": "b"}, IdentityKind.GROUP, "u"),
    ({}, {"user": "bob"}, IdentityKind.GROUP, "bob"),
    ({}, {"user": ""}, IdentityKind.CONTENT, None),
    ({}, {"metadata": {"topic": 3}}, IdentityKind.CONTENT, None),
]


@pytest.mark.parametrize(("headers", "fields", "kind", "agent"), IDENTITIES)
def test_identity_is_read_from_headers_and_fields(headers, fields, kind, agent):
    assert parse(headers, **fields).identity == Identity(kind, agent)


PRIORITIES = [
    ({}, {}, Priority.INTERACTIVE),
    ({}, {"service_tier": "auto"}, Priority.INTERACTIVE),
    ({}, {"service_tier": "priority"}, Priority.INTERACTIVE),
    ({}, {"service_tier": "flex"}, Priority.BACKGROUND),
    ({"x-macfabric-priority": "background"}, {}, Priority.BACKGROUND),
    ({"x-macfabric-priority": " Interactive"}, {"service_tier": "flex"}, Priority.INTERACTIVE),
]


@pytest.mark.parametrize(("headers", "fields", "want"), PRIORITIES)
def test_priority_is_read_from_header_and_service_tier(headers, fields, want):
    assert parse(headers, **fields).priority is want


@pytest.mark.parametrize(
    ("retention", "retain_s"), [(None, 0.0), ("in_memory", 0.0), ("24h", 86_400.0)]
)
def test_cache_retention_is_read(retention, retain_s):
    assert parse({}, prompt_cache_retention=retention).retain_s == retain_s


@pytest.mark.parametrize("named", ["", "urgent", "background,interactive", "\xff"])
def test_unknown_priority_is_rejected(named):
    with pytest.raises(RejectedError) as caught:
        parse({"x-macfabric-priority": named}, service_tier="flex")

    assert caught.value.param == "x-macfabric-priority"
    assert caught.value.status == 400


def test_invalid_user_key_is_hashed():
    identity = parse(user="böb smith/../..").identity

    assert identity.kind is IdentityKind.GROUP
    assert identity.agent.startswith("key-")


def test_billing_header_line_from_proxy_is_dropped_and_listed():
    billing = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli"
    parts = [{"type": "text", "text": text} for text in (billing, "You help.")]
    user = {"role": "user", "content": f"{billing}\nWhat is it?"}
    plain = parse(messages=[{"role": "system", "content": "You help."}, user])
    for content in (parts, f"{billing}\nYou help."):
        request = parse(messages=[{"role": "system", "content": content}, user])
        assert request.prompt.messages == plain.prompt.messages
        assert request.ignored == ("x-anthropic-billing-header",)
    alone = parse(messages=[{"role": "system", "content": billing}, user])
    assert [message.texts for message in alone.prompt.messages] == [(user["content"],)]
    assert plain.ignored == ()


@pytest.mark.parametrize("name", ["", "../x", "a b", "ä", "x" * 129, ".hidden"])
def test_malformed_agent_id_is_rejected(name):
    with pytest.raises(RejectedError) as caught:
        parse({"x-agent-id": name})

    assert caught.value.code == "invalid_agent_id"


def test_sketch_of_longer_conversation_extends_shorter_sketch():
    turns = [{"role": "user", "content": "x" * 2000}]
    short = parse(messages=turns).prompt
    turns += [{"role": "assistant", "content": "y" * 900}, {"role": "user", "content": "z" * 900}]
    longer = parse(messages=turns).prompt

    assert len(short.sketch) == 4  # three full pieces and the end of the message
    assert longer.sketch[:4] == short.sketch
    assert len(longer.sketch) == 8
    assert longer.opening == short.opening


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "temperature", "stop", "n", "tools", "tool_choice", "logit_bias"),
        *("stream", "stream_options", "seed", "metadata", "user", "response_format"),
        *("chat_template_kwargs", "max_tokens", "top_logprobs", "logprobs", "service_tier"),
    ]
)


def status_of(body):
    try:
        parse_chat({}, body)
    except FabricError as error:
        return int(error.status)
    return 200


@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_arbitrary_fields_are_parsed_or_rejected(fields):
    assert status_of({**SMALLEST, **fields}) in (200, 400)


@given(JSON)
def test_arbitrary_message_is_parsed_or_rejected(value):
    user_message = {"role": "user", "content": value}
    call_message = {"role": "assistant", "tool_calls": value}

    for message in (value, user_message, call_message):
        assert status_of({**SMALLEST, "messages": [message]}) in (200, 400)


def test_sketch_omits_answer_to_be_continued():
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One"}]
    begun = parse(messages=messages, continue_final_message=True).prompt
    assert begun.continues
    assert begun.messages == parse(messages=messages).prompt.messages
    assert begun.sketch == parse(messages=messages[:1]).prompt.sketch
