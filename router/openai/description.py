"""OpenAI's routes as the OpenAPI document describes them; responses have a page of their own."""

from typing import Final

from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
from router.api.description import (
    ANYTHING,
    EVERYWHERE,
    FLAG,
    JSON,
    NAMED,
    OBJECT,
    Described,
    Parameter,
    Schema,
    answer,
    array,
    body,
    described_turn,
    either,
    integer,
    listing,
    nullable,
    number,
    one_of,
    ref,
    text,
)
from router.limits import (
    ANSWERS_PER_PROMPT_MAX,
    KEY_CHARS_MAX,
    LOGIT_BIAS_MAX,
    MESSAGE_NAME_CHARS_MAX,
    PROMPTS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOKEN_ID_MAX,
    TOOLS_MAX,
    TOP_LOGPROBS_MAX,
)

_STOP: Final = text(maxLength=STOP_STRING_CHARS_MAX)
_SHORT: Final = text(maxLength=KEY_CHARS_MAX)
TOKENS: Final = either(integer(-1, -1), integer(1, COMPLETION_TOKENS_MAX))
# Of all three kinds of turns.
SAMPLING: Final[dict[str, Schema]] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1, 1 << 31),
    "min_p": number(0, 1),
    "seed": integer(-(1 << 63), (1 << 64) - 1),
    "stop": either(_STOP, array(_STOP, STOP_STRINGS_MAX)),
    "logit_bias": {
        "type": "object",
        "maxProperties": LOGIT_BIAS_MAX,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": number(-100, 100),
    },
    "repetition_penalty": number(0.01, 10),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "ignore_eos": FLAG,
    "response_format": body(
        {"type": one_of("text", "json_object", "json_schema")}, json_schema=OBJECT, schema=OBJECT
    ),
    "structured_outputs": body(
        {},
        json=either(OBJECT, text()),
        json_object=FLAG,
        regex=text(),
        choice=array(text()),
        grammar=text(),
    ),
    "guided_json": either(OBJECT, text()),
    "guided_json_object": FLAG,
    "guided_regex": text(),
    "guided_choice": array(text()),
    "guided_grammar": text(),
}
IDENTITY: Final[dict[str, Schema]] = {
    "user": _SHORT,
    "prompt_cache_key": _SHORT,
    "prompt_cache_retention": one_of("in_memory", "24h"),
    "metadata": body({}, agent_id=_SHORT, user_id=_SHORT),
    "service_tier": one_of("auto", "default", "flex", "priority", "scale"),
}
STREAMED: Final[dict[str, Schema]] = {
    "stream": FLAG,
    "stream_options": body({}, include_usage=FLAG),
}
_CALLED: Final = body({"name": text()}, arguments=either(text(), OBJECT))
_CUSTOM_CALLED: Final = body({"name": text(), "input": text()})
_ID: Final = text(maxLength=MESSAGE_NAME_CHARS_MAX)
_MESSAGE: Final = body(
    {"role": one_of("system", "developer", "user", "assistant", "tool")},
    content=either(text(), array(either(text(), body({"type": text()}, text=text())))),
    name=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    tool_calls=array(
        either(
            body({"function": _CALLED}, id=_ID, type=one_of("function")),
            body({"type": one_of("custom"), "custom": _CUSTOM_CALLED}, id=_ID),
        ),
        TOOLS_MAX,
    ),
    tool_call_id=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    reasoning_content=text(),
    reasoning=ANYTHING,
    thinking=ANYTHING,
    prefix=FLAG,
)
_FUNCTION: Final = body({"name": text(minLength=1)}, description=text(), parameters=OBJECT)
_CUSTOM: Final = body({"name": text(minLength=1)}, description=text(), format=OBJECT)
CHOICE: Final = either(one_of("auto", "none", "required"), OBJECT)
_COUNT: Final = integer(1, ANSWERS_PER_PROMPT_MAX)
_CHAT: Final = body(
    {"model": text(), "messages": array(_MESSAGE, MESSAGES_MAX, 1)},
    n=_COUNT,
    best_of=integer(1, 1),
    continue_final_message=FLAG,
    add_generation_prompt=FLAG,
    **STREAMED,
    **SAMPLING,
    **IDENTITY,
    max_tokens=TOKENS,
    max_completion_tokens=TOKENS,
    logprobs=FLAG,
    top_logprobs=integer(0, TOP_LOGPROBS_MAX),
    tools=array(
        either(
            body({"type": one_of("function"), "function": _FUNCTION}),
            body({"type": one_of("custom"), "custom": _CUSTOM}),
        ),
        TOOLS_MAX,
    ),
    tool_choice=CHOICE,
    parallel_tool_calls=FLAG,
    reasoning_effort=text(maxLength=32),
    chat_template_kwargs=OBJECT,
    functions=ANYTHING,
    function_call=ANYTHING,
    modalities=ANYTHING,
    audio=ANYTHING,
)
_TEXT: Final = text(minLength=1)
_IDS: Final = array(integer(0, TOKEN_ID_MAX), None, 1)
_COMPLETION: Final = body(
    {
        "model": text(),
        "prompt": either(_TEXT, _IDS, array(either(_TEXT, _IDS), PROMPTS_MAX, 1)),
    },
    n=_COUNT,
    best_of=_COUNT,
    **STREAMED,
    **SAMPLING,
    **IDENTITY,
    max_tokens=integer(-1, COMPLETION_TOKENS_MAX),
    logprobs=integer(0, TOP_LOGPROBS_MAX),
    echo=FLAG,
    suffix=ANYTHING,
)
_USAGE: Final = answer(
    prompt_tokens=integer(),
    completion_tokens=integer(),
    total_tokens=integer(),
    prompt_tokens_details=answer(cached_tokens=integer()),
)
_HEAD: Final = {
    "id": text(),
    "created": integer(None),
    "model": text(),
    "system_fingerprint": nullable(text()),
    "usage": _USAGE,
}
_ENDS: Final = one_of("stop", "length", "tool_calls")
_SAID: Final = {
    **answer(role=one_of("assistant"), content=nullable(text()), refusal={"type": "null"}),
}
SCHEMAS: Final[dict[str, Schema]] = {
    "OpenAiError": answer(
        error=answer(
            message=text(minLength=1),
            type=one_of("invalid_request_error", "rate_limit_error", "server_error"),
            param=nullable(text()),
            code=nullable(text()),
        )
    ),
    "OpenAiModel": answer(
        id=text(), object=one_of("model"), created=integer(None), owned_by=text()
    ),
    "OpenAiModels": listing(ref("OpenAiModel")),
    "ChatCompletion": answer(
        **_HEAD,
        object=one_of("chat.completion"),
        choices=array(
            answer(index=integer(), message=_SAID, logprobs=nullable(OBJECT), finish_reason=_ENDS)
        ),
    ),
    "Completion": answer(
        **_HEAD,
        object=one_of("text_completion"),
        choices=array(
            answer(index=integer(), text=text(), logprobs=nullable(OBJECT), finish_reason=_ENDS)
        ),
    ),
}
_MODEL: Final = Parameter("model", "path", text(), "A model's name or alias; may hold slashes.")
_DIALECT: Final = Parameter(
    "anthropic-version", "header", text(), "Asks for the answer in Anthropic's shape."
)
DESCRIBED: Final = (
    described_turn(
        "/v1/chat/completions",
        "openai",
        "A chat turn, streamed or whole.",
        whole=ref("ChatCompletion"),
        body=_CHAT,
    ),
    described_turn(
        "/v1/completions",
        "openai",
        "Continues raw prompts, without a chat template.",
        whole=ref("Completion"),
        body=_COMPLETION,
    ),
    Described(
        "GET",
        "/v1/models",
        "openai",
        "The models that nodes serve, and aliases of them.",
        {JSON: either(ref("OpenAiModels"), ref("AnthropicModels"))},
        EVERYWHERE,
        parameters=(_DIALECT,),
    ),
    Described(
        "GET",
        "/v1/models/{model}",
        "openai",
        "One of them.",
        {JSON: either(ref("OpenAiModel"), ref("AnthropicModel"))},
        (*EVERYWHERE, 404),
        parameters=(_MODEL, _DIALECT),
    ),
    Described(
        "POST",
        "/v1/embeddings",
        "openai",
        "There are none: always 404.",
        {JSON: ref("Error")},
        NAMED,
        statuses=(404,),
    ),
)
