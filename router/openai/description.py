"""OpenAPI descriptions of OpenAI's routes, except the Responses API's."""

from typing import Final

from router.api.openapi import (
    EVERYWHERE,
    JSON,
    NAMED,
    OBJECT,
    Described,
    Parameter,
    answer,
    array,
    described_turn,
    integer,
    listing,
    one_of,
    ref,
    text,
    with_rare,
)
from router.http.schema import Schema, either, nullable
from router.openai.chat_request import CHAT_BODY
from router.openai.completion_request import COMPLETION_BODY
from router.openai.models import ANSWER_FIELDS, CONTEXT_FIELDS, VERSION_PARAMETER

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
    "OpenAiModel": with_rare(
        answer(id=text(), object=one_of("model"), created=integer(None), owned_by=text()),
        **dict.fromkeys((*CONTEXT_FIELDS, *ANSWER_FIELDS), integer(1)),
    ),
    "OpenAiModels": with_rare(
        listing(ref("OpenAiModel")),
        models=array(answer(slug=text(), display_name=text(), base_instructions=text())),
    ),
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
_CODEX: Final = Parameter(
    VERSION_PARAMETER, "query", text(), "Codex's version: adds the catalog that it reads."
)
DESCRIBED: Final = (
    described_turn(
        "/v1/chat/completions",
        "openai",
        "A chat turn, streamed or whole.",
        whole=ref("ChatCompletion"),
        body=CHAT_BODY.schema(),
    ),
    described_turn(
        "/v1/completions",
        "openai",
        "Continues raw prompts, without a chat template.",
        whole=ref("Completion"),
        body=COMPLETION_BODY.schema(),
    ),
    Described(
        "GET",
        "/v1/models",
        "openai",
        "The models that nodes serve, and their aliases.",
        {JSON: either(ref("OpenAiModels"), ref("AnthropicModels"))},
        EVERYWHERE,
        parameters=(_DIALECT, _CODEX),
    ),
    Described(
        "GET",
        "/v1/models/{model}",
        "openai",
        "One model.",
        {JSON: either(ref("OpenAiModel"), ref("AnthropicModel"))},
        (*EVERYWHERE, 404),
        parameters=(_MODEL, _DIALECT),
    ),
    Described(
        "POST",
        "/v1/embeddings",
        "openai",
        "Not supported: always 404.",
        {JSON: ref("Error")},
        NAMED,
        statuses=(404,),
    ),
)
